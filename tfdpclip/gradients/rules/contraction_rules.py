"""The rules for contractions: MatMul, BatchMatMulV2, Einsum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection

import tensorflow as tf

from tfdpclip._constants import vector
from tfdpclip.gradients.flows.contractions import labels_of
from tfdpclip.gradients.forms.outer import Outer
from tfdpclip.gradients.rules.context import (
    by_example,
    in_float,
    in_steps,
    rows_of,
)


def _contraction(use, dz, shape, context):
    """z[out] = sum x[...] p[...]; the parameter's gradient pairs x with dz.

    Every axis has a letter, as in an einsum, and `_Roles` has the role of each letter.
    With x as `[B, G, T, K]` and dz as `[B, G, T, U]`, example i's gradient is
    sum_t x_igt (outer) dz_igt for each g, in the form of `Outer`. Letters of these axes
    are moved to their places, and all further letters are taken out first.

    * A Dense on `[B, T, d]` with the kernel p `[d, n]`: "btd,dn->btn". b is the batch,
      t is time, d is K and n is U: x `[B, T, d]` is unchanged, dz is `[B, T, n]`. Keras
      makes a MatMul "ak,kb->ab" of it, with x `[B * T, d]`: a is the batch, with T
      rows for each example; as there is no letter for time, the rows are time.
      A Dense(1) has p `[d, 1]`: b of the output is `single`, dz `[B * T, 1]` is
      squeezed, and U is 1.
    * A transposed kernel on the left: `tf.matmul(p, x, transpose_a=True,
      transpose_b=True)` with p `[d, n]`, x `[B, d]` is "ka,bk->ab", `[n, B]`. b is the
      batch, k is K, a is U: dz is transposed to `[B, n]`.
    * An einsum with a batch of matrices, a matrix for each of h heads: "bhd,hdk->bhk".
      h is in all three, a group: x is `[B, h, 1, d]` and dz `[B, h, 1, k]`.
    * `tf.matmul(x, p)` of x `[B, 1, T, d]` and p `[h, d, n]`, "lmak,mkb->lmab": m is of
      size 1 in x, which p broadcasts, so it is `lone`: x becomes `[B, T, d]`, m is of p
      and of the output, and U is h * n, dz as `[B, T, h * n]`.
    * Relative positions, `tf.matmul(x, p)` of x `[B, h, T, d]` and p `[1, h, d, n]`,
      "lmak,lmkb->lmab": l is the batch, which p broadcasts, and no axis of p.
    * "btd,dn->bn": t is of x alone, so it is `gone`: x is summed over it first.

    Args:
      use: the use of p, as for all rules.
      dz: the gradient at the output.
      shape: the shape of p.
      context: B and the analysis.
    """
    letters = labels_of(use.op)
    if letters is None or len(use.op.inputs) != 2:
        return None
    labels, out = letters
    source = use.op.inputs[1 - use.index]
    x_labels, p_labels = labels[1 - use.index], labels[use.index]
    if any(len(set(names)) != len(names) for names in (x_labels, p_labels, out)):
        return None
    batch = _batch_letter(source, x_labels, context)
    if batch is None or batch not in out:
        return None
    own = dict(zip(p_labels, shape, strict=True))
    if own.pop(batch, 1) != 1:
        return None
    roles = _Roles.of(batch, x_labels, source.shape, own, out)
    if roles is None:
        return None
    x = in_float(source)
    if roles.lone:
        x = tf.squeeze(x, axis=_places(roles.lone, x_labels))
        x_labels = _without(roles.lone, x_labels)
    if roles.gone:
        x = tf.reduce_sum(x, axis=_places(roles.gone, x_labels))
        x_labels = _without(roles.gone, x_labels)
    if roles.single:
        dz = tf.squeeze(dz, axis=_places(roles.single, out))
        out = _without(roles.single, out)
    like = source if context.flows[source].axes == (0,) else use.output
    steps = rows_of(context, like)
    for place in _places(roles.time, out):
        size = dz.shape[place]
        steps = None if steps is None or size is None else steps * size
    ahead = batch + roles.groups + roles.time
    x = _transposed(x, [x_labels.index(n) for n in ahead + roles.inner])
    z = _transposed(dz, [out.index(n) for n in ahead + roles.outer])
    groups = [roles.sizes[n] for n in roles.groups]
    x = _stacked(x, context, like, groups, [roles.sizes[n] for n in roles.inner])
    z = _stacked(z, context, like, groups, [roles.sizes[n] for n in roles.outer])
    layout = (tuple(shape), roles.core, tuple(roles.order), bool(groups))
    axes = None
    if len(roles.inner) == len(roles.outer) == 1 and not groups:
        axes = (p_labels.index(roles.inner), p_labels.index(roles.outer))
    return Outer(x, z, _arrangement(roles, shape), shape, steps, layout, axes)


def _batch_letter(source, letters: str, context) -> str | None:
    """The letter of the axis that counts examples; None unless there is exactly one."""
    axes = context.flows[source].axes or ()
    return letters[axes[0]] if len(axes) == 1 else None


@dataclasses.dataclass(frozen=True)
class _Roles:
    """The roles of the letters of x, p and the output, except the batch's letter.

    Attributes:
      lone: in x, of size 1 there, where p broadcasts it.
      gone: only in x: summed over.
      single: in the output, of size 1 there, because it has size 1 in p.
      core: in p, without axes of size 1, which are no axes of its gradient.
      sizes: the sizes of the letters of `core`.
      groups: in x, p and the output, G: a batch of matrices.
      inner: in x and p, K: the op sums over these.
      outer: in p and the output, U.
      time: in x and the output, T.
    """

    lone: str
    gone: str
    single: str
    core: str
    sizes: dict[str, int]
    groups: str
    inner: str
    outer: str
    time: str

    @property
    def order(self) -> str:
        """The letters of `core` in the order of `Outer`."""
        return self.groups + self.inner + self.outer

    @classmethod
    def of(cls, batch, x, x_shape, p, out) -> _Roles | None:
        """The roles, or None if p has a letter that is only in p.

        Args:
          batch: the letter of the batch, in x and the output alone.
          x: the letters of x.
          x_shape: the shape of x.
          p: the static sizes of p's axes by their letters.
          out: the letters of the output.
        """
        sizes = {n: size for n, size in p.items() if size != 1}
        core = "".join(sizes)
        lone = "".join(
            n for n, d in zip(x, x_shape, strict=True) if d == 1 and n in core
        )
        x = _without(lone, x)
        if set(core) - set(x) - set(out):
            return None
        return cls(
            lone,
            gone=_without(core + out, x),
            single="".join(n for n in out if n in p and n not in x + core),
            core=core,
            sizes=sizes,
            groups="".join(n for n in core if n in x and n in out),
            inner="".join(n for n in core if n in x and n not in out),
            outer="".join(n for n in core if n not in x and n in out),
            time="".join(n for n in x if n in out and n not in core + batch),
        )


def _without(gone: Collection[str], letters: str) -> str:
    return "".join(n for n in letters if n not in gone)


def _places(names: str, letters: str) -> list[int]:
    return [letters.index(n) for n in names]


def _transposed(tensor, perm):
    return tensor if perm == sorted(perm) else tf.transpose(tensor, perm)


def _stacked(tensor, context, like, groups: list[int], tail: list[int]):
    """`[N, groups..., time..., tail...]` as `[B, (G,) T, prod(tail)]`."""
    width = math.prod(tail)
    if not groups:
        return in_steps(tensor, context, like, width, len(tail))
    tensor = by_example(tensor, context, like)
    dims = tf.unstack(tf.shape(tensor))
    time = math.prod(dims[2 + len(groups) : len(dims) - len(tail)])
    count = math.prod(groups)
    tensor = tf.reshape(tensor, [dims[0], dims[1], count, time, width])
    tensor = tf.transpose(tensor, [0, 2, 1, 3, 4])
    return tf.reshape(tensor, [dims[0], count, dims[1] * time, width])


def _arrangement(roles: _Roles, shape: list[int]) -> Callable:
    """From products `[*lead, G, K, U]` to gradients `[*lead, *shape]`; see `Outer`."""

    def arrange(products, lead):
        ahead = len(lead)
        perm = [*range(ahead), *(ahead + k for k in _places(roles.core, roles.order))]
        if perm != list(range(len(perm))):
            sizes = [roles.sizes[n] for n in roles.order]
            products = tf.transpose(tf.reshape(products, [*lead, *sizes]), perm)
        return tf.reshape(products, vector(*lead, *shape))

    return arrange


#: The rules, by type of op.
RULES: dict[str, Callable] = dict.fromkeys(
    ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"), _contraction
)
