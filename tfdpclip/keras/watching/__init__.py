"""What ran is what is accounted for: everything that watches a private run.

`fit` gives an optimizer a loss and variables, and a callback a number of batches. What
else happens in a training step, and between two of them, has to be found out.

* On the optimizer's side, in every loop: `private_state` (what layers keep of batches),
  `constant_state` (what a loss reads stays what it is), `weight_watch` (marks on the
  optimizer's own writes) and `step_history` (whose steps are behind the weights).
* On the budget's side, in `fit`: `adapted_layers` (what layers learned of data before),
  `draw_check` (who drew the batches), `executions` (how many steps one call of the
  training function ends), `fit_watch` (what that call was fed and wrote to, by
  `step_search` of the traced step and by `weight_watch` between two; by
  `released_updates`, what else writes to weights without data), `noise_plan` (the
  noise of the steps to come), `room` (how many of them fit) and `agreement` (that all
  processes of a run say the same).
"""
