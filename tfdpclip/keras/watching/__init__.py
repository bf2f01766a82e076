"""Checks that the run which is accounted for is the run that happened.

`fit` gives an optimizer a loss and variables, and gives a callback a batch number. Each
file here finds one kind of honest mistake that neither of them shows.

In every training loop (called by the optimizer):

* `private_state`: a layer keeps statistics of private batches. Example: the moving
  averages of `BatchNormalization` are saved with the model, without noise.
* `constant_state`: a variable that the loss reads changes between two steps. Example: a
  callback assigns the mean label of the last epoch to a weight of the loss.
* `step_history`: earlier steps are forgotten. Example: the weights come from a
  checkpoint of 500 private steps, and a new optimizer would count from 0.

In `fit` (called by `PrivacyBudget`):

* `adapted_layers`: preprocessing learned from private data. Example: `Normalization`
  was adapted to the training data, without noise.
* `choosing_callbacks`: a callback decides by a metric without noise, or names files by
  it. Example: `EarlyStopping` on the loss of the private batches.
* `public_claims`: private data are taken for public. Example: `PublicGradientNorms`
  measures the arrays that the batches are drawn from.
* `draw_check`: the data were not drawn by the accounted scheme. Example: `fit(x, y)`
  with arrays, while the budget counts Poisson samples; or the accumulation or batch
  size of the optimizer differs from that of the batches.
* `followed_step`: `train_step` ignores the weights that tell drawn rows from padding.
  Example: `x, y = data` in a `train_step` that was written for plain batches.
* `executions`: a step is not made of the batches that are counted for it. Example:
  `train_step` calls `minimize` twice for one batch.
* `fit_watch`: the training function gets altered data, or writes more than the private
  update. Example: `fit(batches.cache())`, which trains on the same draws again.
* `compiled_steps`: XLA compiles a step whose gradients were not compared. Example: the
  first step on a GPU with Keras 3, which runs uncompiled, once.
* `step_search`: the same in the traced step, for `fit_watch`. Its graph is read by
  `step_labels`, once for each trace. Example: `train_step` also lets a plain `SGD()`
  apply gradients to a shared layer. An update that reads no data is an exception: a
  GAN's generator learns from random numbers and the released critic.
* `weight_watch`: the same between two steps, by the values of the weights. Example: a
  callback calls `model.set_weights` after each batch.
* `noise_plan`: the noise is not the noise that is counted. Example: a callback sets
  `optimizer.iterations` back, and the noise schedule starts again.
* `remaining_steps`: the budget has no room for the steps. Example: the same ledger
  already holds a run that spent the whole epsilon.
* `agreement`: the processes or replicas of a run differ. Example: one terminal was
  started without the flag `--noise_multiplier=1.1`.
"""
