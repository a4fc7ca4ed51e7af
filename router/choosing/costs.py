"""What work costs here, learnt from what it did cost: seconds as straight functions of its size, none of them ever negative.

    observe(sizes, seconds) ──▶ the newest samples of each class of size ──refit──▶ coefficients ≥ 0 ──▶ predict(sizes)

    prefill    fixed + tokens computed + pairs of tokens attended (S² − c²) + decodes that share the step   (FIELD: 2.2)
    transfer   fixed + bytes, of the part that was not hidden behind computing
    the rest   a mean: from the last byte to the decode engine's step, and what each way takes beside its stages

What keeps an estimate sane: errors are relative, so that small prompts matter as much as long ones, and one sample's pull is
bounded (Huber's weights around a median), so outliers, up to a quarter of all, do not move it far. Newer samples weigh more,
and each class of size keeps its own. Where no sample says anything, a prior gives the shape at its anchors; its scale is
learnt, so that a machine ten times as fast is so at every size. Coefficients that are not negative make every estimate
monotone. A pool has one curve, each worker a factor on it that counts as it gets samples. Does not know requests or clocks.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul

from contracts.worker import WorkerKind, WorkerRef

_KEPT = 12  # samples of one class of size
_FADE = 0.98  # what a sample weighs after each that came later
_EAGER, _LAZY = 32, 8  # fitted with every one of the first samples, then, when it is asked to, after every eighth
_ROUNDS = 3  # of reweighting
_HUBER = 3.0  # median errors, above which a sample pulls no harder
_LEAST_ERROR = 0.05  # relative: what is nearer than this is no error
_ANCHOR_WEIGHT = 0.1  # of the prior at one anchor, in samples
_AGREED, _DRIFT = 3, 0.3  # as many in a row that are off to one side, by this or their usual error, are a new pace
_DOUBT = 0.4  # samples that say that the prior's own scale is right
_SURPRISE = 0.5  # how far, in natural logarithms, one sample may move a worker's factor
_GRAIN_S = 1e-3  # durations below are not told apart
_WINDOW = 32  # samples that a mean remembers
_BELIEVED = (1.0, 1e8)  # tokens per second
_TRUSTED = 4  # samples of a worker from which on its own factor counts half
_MAX_FACTORS = 1024
_MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class _Sample:
    sizes: tuple[float, ...]
    seconds: float
    number: int
    believed_s: float  # by the prior


class LinearCost:
    """Seconds = Σ coefficient · size, over a vector of sizes; see the module for what bends it and what does not.

    `prior` are the coefficients believed before any sample, `anchors` the sizes at which the prior holds where samples do not
    say better. Durations shorter than `grain_s` are not told apart. Costs O(samples kept) per refit, below a millisecond: so
    whoever has samples often says when there is time for it, with `refit`.
    """

    def __init__(self, prior: Sequence[float], anchors: Sequence[Sequence[float]], grain_s: float = _GRAIN_S) -> None:
        self.num_samples = 0
        self._num_fitted = 0  # of these
        self._prior = tuple(prior)
        self._anchors = tuple(tuple(anchor) for anchor in anchors)
        self._grain_s = grain_s
        self._kept: dict[
            int, deque[_Sample]
        ] = {}  # by class of size, so that a rare size is not forgotten for a common one
        self._coefficients = self._prior
        self._newest: deque[_Sample] = deque(maxlen=_AGREED)
        self._usual_error = _DRIFT
        self._drift = 1.0

    def predict(self, sizes: Sequence[float]) -> float:
        """Seconds that work of these sizes takes; never negative, and never less for more work."""
        return self._drift * _dot(self._coefficients, sizes)

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Work of these sizes took so long. What is not a duration (negative, infinite, not a number) is ignored."""
        if not (math.isfinite(seconds) and seconds >= 0 and all(math.isfinite(s) and s >= 0 for s in sizes)):
            return
        self.num_samples += 1
        believed_s = _dot(self._prior, sizes)
        kept = self._kept.setdefault(math.frexp(believed_s)[1], deque(maxlen=_KEPT))
        sample = _Sample(tuple(sizes), seconds, self.num_samples, believed_s)
        kept.append(sample)
        self._newest.append(sample)
        if self.num_samples <= _EAGER:
            self._fit()
        self._drift = self._drifted()

    def refit(self) -> bool:
        """Follow what was observed, if that is enough to tell anything new; whether it was."""
        if self.num_samples - self._num_fitted < _LAZY:
            return False
        self._fit()
        self._drift = self._drifted()
        return True

    def _drifted(self) -> float:
        """By which factor the newest samples differ from the fit, if all of them do and to the same side; else 1."""
        if len(self._newest) < _AGREED:
            return 1.0
        grain_s = self._grain_s
        fitted = [_dot(self._coefficients, sample.sizes) + grain_s for sample in self._newest]
        factors = sorted((s.seconds + grain_s) / f for s, f in zip(self._newest, fitted, strict=True))
        far = 1 + max(_DRIFT, self._usual_error)
        return factors[_AGREED // 2] if factors[0] > far or factors[-1] < 1 / far else 1.0

    def _fit(self) -> None:
        """Scale the prior to the samples, then let them pull it into shape, those that lie far off no harder than others."""
        self._num_fitted = self.num_samples
        samples = [sample for kept in self._kept.values() for sample in kept]
        ages = [_FADE ** (self.num_samples - sample.number) for sample in samples]
        grain_s = self._grain_s
        # Work so small that it is mostly the fixed part says little of what more of it takes.
        tells = [a * (1 - self._prior[0] * s.sizes[0] / s.believed_s) for a, s in zip(ages, samples, strict=True)]
        ratios = [(s.seconds + grain_s) / (s.believed_s + grain_s) for s in samples]
        scale = _median([1.0, *ratios], [_DOUBT, *tells])
        fitted = tuple(scale * c for c in self._prior)
        anchors = [(anchor, _dot(fitted, anchor)) for anchor in self._anchors]
        for _ in range(_ROUNDS):
            expected = [_dot(fitted, s.sizes) + grain_s for s in samples]
            errors = [abs(s.seconds + grain_s - e) / e for s, e in zip(samples, expected, strict=True)]
            bound = max(_LEAST_ERROR, _HUBER * _median(errors, ages))
            rows = [(anchor, seconds, _ANCHOR_WEIGHT / (seconds + grain_s) ** 2) for anchor, seconds in anchors]
            for sample, age, e, error in zip(samples, ages, expected, errors, strict=True):
                pull = 1.0 if error <= bound else bound / error
                rows.append((sample.sizes, sample.seconds, age * pull / e**2))
            fitted = _least_squares(rows)
            self._usual_error = bound
        self._coefficients = fitted


def _median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted one."""
    ordered = sorted(zip(values, weights, strict=True))
    half = sum(weights) / 2
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    return ordered[-1][0]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    products: Iterator[float] = map(mul, left, right)
    return sum(products)


def _least_squares(rows: Sequence[tuple[Sequence[float], float, float]]) -> tuple[float, ...]:
    """The x ≥ 0 with the least Σ weight · (sizes · x - seconds)² over rows (sizes, seconds, weight).

    The best of the solutions on each set of coefficients above 0: exact, and there are few of them.
    """
    size = len(rows[0][0])
    gram = [[0.0] * size for _ in range(size)]
    moment = [0.0] * size
    for sizes, seconds, weight in rows:
        for i in range(size):
            scaled = weight * sizes[i]
            moment[i] += scaled * seconds
            row = gram[i]
            for j in range(i + 1):
                row[j] += scaled * sizes[j]
    for i in range(size):
        for j in range(i):
            gram[j][i] = gram[i][j]
    best, best_value = (0.0,) * size, 0.0
    for count in range(size, 0, -1):
        for chosen in itertools.combinations(range(size), count):
            part = _solution([[gram[i][j] for j in chosen] for i in chosen], [moment[i] for i in chosen])
            if part is None or min(part) < 0:
                continue
            value = -_dot(part, [moment[i] for i in chosen])  # where the gradient is 0
            if value < best_value:
                places = dict(zip(chosen, part, strict=True))
                best, best_value = tuple(places.get(i, 0.0) for i in range(size)), value
        if count == size and best_value < 0:
            break  # the unconstrained optimum is allowed
    return best


def _solution(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting of a small, scaled system; None when it has no one solution."""
    size = len(right)
    scales = [math.sqrt(matrix[i][i]) for i in range(size)]
    if min(scales) <= 0:
        return None
    rows = [[matrix[i][j] / scales[i] / scales[j] for j in range(size)] + [right[i] / scales[i]] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        if abs(rows[pivot][i]) < 1e-12:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - _dot(rows[i][i + 1 : size], found[i + 1 :])) / rows[i][i]
    return [value / scale for value, scale in zip(found, scales, strict=True)]


class Smoothed:
    """A mean that forgets; a sample pulls it at most as hard as one at twice its usual deviation."""

    def __init__(self, prior_s: float) -> None:
        self.mean_s = prior_s
        self.num_samples = 0
        self._deviation_s = max(prior_s, 1e-3)

    def observe(self, seconds: float) -> None:
        """One more; what is not finite is ignored, what is negative counts as 0."""
        if not math.isfinite(seconds):
            return
        self.num_samples += 1
        share = 1 / min(self.num_samples + 1, _WINDOW)  # the prior counts as one sample
        bound = _HUBER * self._deviation_s
        away = max(seconds, 0.0) - self.mean_s
        self._deviation_s = max(1e-4, self._deviation_s + share * (min(abs(away), 2 * bound) - self._deviation_s))
        self.mean_s += share * max(-bound, min(bound, away))


Sizes = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class PromptWork:
    """A prompt of `num_tokens` tokens of which `num_cached` need not be computed, beside `num_beside` decodes."""

    num_tokens: int
    num_cached: int = 0
    num_beside: int = 0

    @property
    def num_computed(self) -> int:
        """Tokens that are computed: at least one, which makes the first token."""
        return max(1, self.num_tokens - self.num_cached)

    @property
    def num_attended(self) -> int:
        """Pairs of tokens, twice: S² − c²."""
        num_computed = self.num_computed
        return num_computed * (2 * max(self.num_tokens, num_computed) - num_computed)

    @property
    def sizes(self) -> Sizes:
        """(1, computed/1000, (S² − c²)/10⁶, decodes beside/100): of like magnitude, for the arithmetic's sake."""
        return _sizes(1, self.num_computed, self.num_attended, self.num_beside)


@dataclass(frozen=True, slots=True)
class Together:
    """Several prompts, one after the other, as one sum: whole numbers, so that what is added and taken off leaves nothing."""

    num_prompts: int = 0
    num_computed: int = 0
    num_attended: int = 0
    num_beside: int = 0

    def plus(self, work: PromptWork, times: int = 1) -> Together:
        """With this prompt too; `times` -1 without it."""
        return Together(
            self.num_prompts + times,
            self.num_computed + times * work.num_computed,
            self.num_attended + times * work.num_attended,
            self.num_beside + times * work.num_beside,
        )

    @property
    def sizes(self) -> Sizes:
        """As those of one prompt."""
        return _sizes(self.num_prompts, self.num_computed, self.num_attended, self.num_beside)


def _sizes(num_prompts: int, num_computed: int, num_attended: int, num_beside: int) -> Sizes:
    return float(num_prompts), num_computed / 1e3, num_attended / 1e6, num_beside / 100


_PREFILL_ANCHORS = tuple(
    PromptWork(*shape).sizes for shape in ((16, 0, 0), (256, 0, 0), (2048, 0, 0), (16384, 0, 0), (256, 0, 16))
)
_PREFILL_PRIOR = (0.02, 1.0, 0.02, 0.1)  # 1,000 tokens/s, with the shape of a small model on a CPU
_TRANSFER_PRIOR = (1e-3, 0.5e-3)  # 2 GiB/s
_SETTLE_PRIOR_S = 5e-3
_OVERHEAD_PRIOR_S = {WorkerKind.PREFILL: 3e-3, WorkerKind.DECODE: 1e-3}


class PrefillCost:
    """Seconds of prefill in one pool: a curve of the pool, and a factor of each worker that has samples of its own."""

    def __init__(self) -> None:
        self._curve = LinearCost(_PREFILL_PRIOR, _PREFILL_ANCHORS)
        self._factors: dict[WorkerRef, tuple[float, int]] = {}  # natural logarithm, samples
        self._announced = False

    @property
    def num_samples(self) -> int:
        """Prompts that it has learnt from."""
        return self._curve.num_samples

    def believe(self, tokens_per_s: float) -> None:
        """A worker's own word of its speed, while nothing better is known."""
        if self._announced or self.num_samples or not _BELIEVED[0] <= tokens_per_s <= _BELIEVED[1]:
            return
        self._announced = True
        self._curve = LinearCost([c * 1e3 / tokens_per_s for c in _PREFILL_PRIOR], _PREFILL_ANCHORS)

    def predict(self, ref: WorkerRef, work: PromptWork) -> float:
        """Seconds from a prompt's first chunk to its first token on this worker."""
        logarithm, num_samples = self._factors.get(ref, (0.0, 0))
        return self._curve.predict(work.sizes) * math.exp(logarithm * num_samples / (num_samples + _TRUSTED))

    def refit(self) -> bool:
        """See LinearCost."""
        return self._curve.refit()

    def observe(self, ref: WorkerRef, sizes: Sizes, seconds: float) -> None:
        """Work of these sizes, of one prompt or of several together, took so long."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        expected = self._curve.predict(sizes)
        self._curve.observe(sizes, seconds)
        logarithm, num_samples = self._factors.pop(ref, (0.0, 0))  # the newest goes to the end
        if self.num_samples > 1:
            away = math.log((seconds + _GRAIN_S) / (expected + _GRAIN_S)) - logarithm
            num_samples += 1
            logarithm += max(1 / num_samples, 1 / _WINDOW) * max(-_SURPRISE, min(_SURPRISE, away))
        self._factors[ref] = (logarithm, num_samples)
        while len(self._factors) > _MAX_FACTORS:
            del self._factors[next(iter(self._factors))]


class Costs:
    """All that one router has learnt; `prefill` by pool. `settle` is from a hand-off's last byte to its decode step,
    `overhead` what a first token takes beside queue and compute, by the pool that makes it.
    """

    def __init__(self) -> None:
        self.prefill = {kind: PrefillCost() for kind in WorkerKind}
        self.overhead = {kind: Smoothed(prior_s) for kind, prior_s in _OVERHEAD_PRIOR_S.items()}
        self.settle = Smoothed(_SETTLE_PRIOR_S)
        self._transfer = LinearCost(_TRANSFER_PRIOR, ((1.0, 0.25), (1.0, 16.0), (1.0, 256.0)))

    def refit(self) -> bool:
        """Let one of the curves follow its samples, if any has new ones; below a millisecond. Whether one had."""
        return any(cost.refit() for cost in self.prefill.values()) or self._transfer.refit()

    def transfer_s(self, kv_bytes: float) -> float:
        """Seconds of a transfer of `kv_bytes` that are not hidden behind computing."""
        return self._transfer.predict((1.0, kv_bytes / _MIB))

    def transferred(self, kv_bytes: float, exposed_s: float) -> None:
        """A hand-off of so many bytes was felt for so long."""
        self._transfer.observe((1.0, kv_bytes / _MIB), exposed_s)
