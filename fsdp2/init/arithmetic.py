"""Elementary functions of float64 tensors with the same bits everywhere. Layer: init.

`torch.log`, `torch.cos` and the like may differ in the last bit between devices, libraries and versions, and even
between positions in one tensor (a vector loop and its remainder). So may `torch.sqrt`, for which the CPU calls MKL. The
functions here use only additions, multiplications, divisions and bit shifts, for each of which IEEE 754 defines the
rounding. Each operation is a separate call, so that nothing is fused. Accurate to a few units in the last place.
"""

from collections.abc import Sequence

import torch

__all__ = ["exp", "log", "normal_quantile", "sin_cos_half_pi", "sqrt"]

SPLITTER = 2.0**27 + 1.0  # a number times this gives its upper half, whose square is exact (Dekker, 1971)
LN2 = 0.6931471805599453
LN2_HIGH, LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10  # their sum is ln 2; k * LN2_HIGH is exact
HALF_PI = 1.5707963267948966
MANTISSA_BITS, EXPONENT_BIAS = 52, 1023

# Coefficients of Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37
# (1988), highest power first: numerator and denominator near the centre, in the tails, and far out in the tails.
CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
     5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)  # fmt: skip
TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940, 2.05319162663775882187, 1.0),
)  # fmt: skip
FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip

LOG_SERIES = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))  # atanh(s) / s, in s ** 2, for |s| <= 0.172
EXP_SERIES = tuple(1.0 / fact for fact in (6227020800, 479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24,
                                           6, 2, 1, 1))  # fmt: skip
# Coefficients of sin(x) / x and cos(x), in x ** 2, for |x| <= pi / 4.
SIN_SERIES = (1 / 355687428096000, -1 / 1307674368000, 1 / 6227020800, -1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120,
              -1 / 6, 1.0)  # fmt: skip
COS_SERIES = (1 / 20922789888000, -1 / 87178291200, 1 / 479001600, -1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2,
              1.0)  # fmt: skip


def log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of positive, normal numbers."""
    mantissa, exponent = _split(x)
    s = (mantissa - 1.0).div_(mantissa + 1.0)
    series = _polynomial(LOG_SERIES, s * s).mul_(s).mul_(2.0)
    return (exponent * LN2_HIGH).add_(series.add_(exponent.mul_(LN2_LOW)))


def exp(x: torch.Tensor) -> torch.Tensor:
    """The exponential of numbers between -700 and 700; others are clamped to this range."""
    x = x.clamp(-700.0, 700.0)
    times = (x * (1.0 / LN2)).round_()
    rest = (x - times * LN2_HIGH).sub_(times * LN2_LOW)
    power = times.to(torch.int64).add_(EXPONENT_BIAS).bitwise_left_shift_(MANTISSA_BITS)
    return _polynomial(EXP_SERIES, rest).mul_(power.view(torch.float64))


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square root of numbers between 1e-200 and 1e200: Newton's step from torch's root, which may be one unit in
    the last place beside it, with the exact remainder. Rounded correctly but for the number just below a power of 4,
    and the same whichever neighbour torch gives."""
    root = x.sqrt()
    scaled = root * SPLITTER
    high = scaled - (scaled - root)
    low = root - high
    square = root * root
    error = (high * high).sub_(square).add_((high * low).mul_(2.0)).add_(low * low)
    rest = (x - square).sub_(error)
    return root + rest.div_(root).mul_(0.5)


def sin_cos_half_pi(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sine and cosine of ``x * pi / 2`` for x between -1 and 1."""
    turned = x.abs() > 0.5  # sin and cos are exchanged there
    near = torch.where(turned, 1.0 - x.abs(), x.abs()).mul_(HALF_PI)
    square = near * near
    sine = _polynomial(SIN_SERIES, square).mul_(near)
    cosine = _polynomial(COS_SERIES, square)
    magnitude = torch.where(turned, cosine, sine)
    return torch.where(x < 0, -magnitude, magnitude), torch.where(turned, sine, cosine)


def normal_quantile(p: torch.Tensor) -> torch.Tensor:
    """The standard normal quantile of `p`, which is strictly between 0 and 1."""
    q = p - 0.5
    result = _ratio(CENTRE, (q * q).neg_().add_(0.180625)).mul_(q)
    outer = (q.abs() > 0.425).nonzero().squeeze(1)
    if outer.numel():
        of_outer = p[outer]
        result[outer] = _tail(torch.minimum(of_outer, 1.0 - of_outer)).copysign_(q[outer])
    return result


def _tail(p: torch.Tensor) -> torch.Tensor:
    """The negated quantile of p, for p up to 0.075."""
    r = sqrt(log(p).neg_())
    result = _ratio(TAIL, r - 1.6)
    far = (r > 5.0).nonzero().squeeze(1)
    if far.numel():
        result[far] = _ratio(FAR, r[far] - 5.0)
    return result


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: torch.Tensor) -> torch.Tensor:
    numerator, denominator = coefficients
    return _polynomial(numerator, x).div_(_polynomial(denominator, x))


def _polynomial(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """By Horner's rule, two operations per coefficient."""
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result.mul_(x).add_(coefficient)
    return result


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mantissa, between the square root of 1/2 and that of 2, and exponent, both in float64."""
    bits = x.view(torch.int64)
    # The bits of 1.0 minus those of sqrt(1/2): adding them carries into the exponent if the mantissa is above sqrt(2).
    shifted = bits + 0x00095F619980C433
    exponent = shifted.bitwise_right_shift(MANTISSA_BITS).sub_(EXPONENT_BIAS)
    mantissa = bits.sub(exponent.bitwise_left_shift(MANTISSA_BITS)).view(torch.float64)
    return mantissa, exponent.to(torch.float64)
