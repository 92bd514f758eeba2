"""TensorFlow Probability's distributions by what they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any

import tensorflow as tf
import tensorflow_probability as tfp

tfd, tfb = tfp.distributions, tfp.bijectors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Distributions, which one program computes.

    Args:
      distributions: by name what makes one of a positive parameter, and what makes
        values that it may take of normal numbers [rows].
      not_sampled: those of which no samples are drawn: TF's jit does not compile it, or
        they are made of samples of another, such as of a gamma distribution.
    """

    distributions: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]
    not_sampled: Set[str] = frozenset()


def _same(x: tf.Tensor) -> tf.Tensor:
    return x


def _counts(x: tf.Tensor) -> tf.Tensor:
    return tf.floor(tf.abs(tf.stop_gradient(x)) * 2)


def _bits(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x > 0, tf.float32)


def _simplex(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.softmax(tf.stack([x, 2 * x, 0 * x], -1))


def _pairs(x: tf.Tensor) -> tf.Tensor:
    return tf.stack([x, tf.sin(3 * x)], -1)


def _one_hot(x: tf.Tensor) -> tf.Tensor:
    return tf.one_hot(tf.cast(x > 0, tf.int32), 3)


def _circle(x: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.cos(x), tf.sin(x)], -1)


def _matrices(x: tf.Tensor) -> tf.Tensor:
    """Positive definite ones [rows, 2, 2]."""
    a = tf.stack([_pairs(x), _pairs(x + 1)], -2)
    return a @ tf.transpose(a, [0, 2, 1]) + tf.eye(2)


def _of(support: Callable[..., Any], **makers: Callable[..., Any]) -> dict[str, Any]:
    return {name: (make, support) for name, make in makers.items()}


def _loc_scale(*names: str) -> dict[str, Callable[..., Any]]:
    return {name: lambda s, n=name: getattr(tfd, n)(0.3, s) for name in names}


_LOCATED = ("Normal", "Cauchy", "Laplace", "Logistic", "Gumbel", "Moyal")
GROUPS: dict[str, Group] = {
    "real": Group(
        distributions=_of(
            _same,
            **_loc_scale(*_LOCATED),
            DoublesidedMaxwell=lambda s: tfd.DoublesidedMaxwell(0.0, s),
            ExponentiallyModifiedGaussian=lambda s: tfd.ExponentiallyModifiedGaussian(
                0.1, s, 1.0
            ),
            GeneralizedExtremeValue=lambda s: tfd.GeneralizedExtremeValue(
                0.0, 4.0, 0.1
            ),
            GeneralizedNormal=lambda s: tfd.GeneralizedNormal(0.0, s, 1.5),
            JohnsonSU=lambda s: tfd.JohnsonSU(0.1, s, 0.0, 1.0),
            SinhArcsinh=lambda s: tfd.SinhArcsinh(0.1, s, 0.2),
            StudentT=lambda s: tfd.StudentT(3.0, 0.1, s),
            TwoPieceNormal=lambda s: tfd.TwoPieceNormal(0.0, s, 1.2),
            Mixture=lambda s: tfd.Mixture(
                tfd.Categorical(probs=[0.3, 0.7]),
                [tfd.Normal(0.0, s), tfd.Normal(1.0, s)],
            ),
            MixtureSameFamily=lambda s: tfd.MixtureSameFamily(
                tfd.Categorical(probs=[0.3, 0.7]), tfd.Normal([0.0, 1.0], s)
            ),
            VonMises=lambda s: tfd.VonMises(0.1, s),
        ),
        not_sampled={"GeneralizedNormal", "VonMises"},
    ),
    "positive": Group(
        distributions=_of(
            lambda x: tf.abs(x) + 0.1,
            Chi=lambda s: tfd.Chi(3.0 * s),
            Chi2=lambda s: tfd.Chi2(3.0 * s),
            Exponential=lambda s: tfd.Exponential(s),
            ExpGamma=lambda s: tfd.ExpGamma(s, 1.0),
            Gamma=lambda s: tfd.Gamma(s, 1.0),
            GeneralizedPareto=lambda s: tfd.GeneralizedPareto(0.0, s, 0.1),
            HalfCauchy=lambda s: tfd.HalfCauchy(0.0, s),
            HalfNormal=lambda s: tfd.HalfNormal(s),
            HalfStudentT=lambda s: tfd.HalfStudentT(3.0, 0.0, s),
            InverseGamma=lambda s: tfd.InverseGamma(3.0, s),
            InverseGaussian=lambda s: tfd.InverseGaussian(1.0, s),
            LogLogistic=lambda s: tfd.LogLogistic(0.1, s),
            LogNormal=lambda s: tfd.LogNormal(0.1, s),
            Pareto=lambda s: tfd.Pareto(s, 0.05),
            Weibull=lambda s: tfd.Weibull(s, 1.0),
        ),
        not_sampled={"Chi", "Chi2", "ExpGamma", "HalfStudentT", "InverseGamma"},
    ),
    "between 0 and 1": Group(
        distributions=_of(
            lambda x: tf.sigmoid(x),
            Beta=lambda s: tfd.Beta(s, 1.5),
            ContinuousBernoulli=lambda s: tfd.ContinuousBernoulli(logits=s),
            Kumaraswamy=lambda s: tfd.Kumaraswamy(s, 1.5),
            LogitNormal=lambda s: tfd.LogitNormal(0.1, s),
            RelaxedBernoulli=lambda s: tfd.RelaxedBernoulli(s, logits=0.3),
            Triangular=lambda s: tfd.Triangular(0.0, 1.0, s),
            TruncatedNormal=lambda s: tfd.TruncatedNormal(0.3, s, -1.0, 2.0),
            TruncatedCauchy=lambda s: tfd.TruncatedCauchy(0.3, s, -1.0, 2.0),
            Uniform=lambda s: tfd.Uniform(-s, 1.5),
            PERT=lambda s: tfd.PERT(0.0, s, 1.0),
            SigmoidBeta=lambda s: tfd.SigmoidBeta(s, 1.5),
        ),
        not_sampled={"PERT", "SigmoidBeta"},
    ),
    "counts": Group(
        distributions={
            **_of(
                _counts,
                Binomial=lambda s: tfd.Binomial(9.0, logits=s),
                BetaBinomial=lambda s: tfd.BetaBinomial(9.0, s, 1.5),
                Geometric=lambda s: tfd.Geometric(logits=s),
                NegativeBinomial=lambda s: tfd.NegativeBinomial(3.0, logits=s),
                Poisson=lambda s: tfd.Poisson(s),
                Categorical=lambda s: tfd.Categorical(logits=s * tf.range(9.0)),
                OrderedLogistic=lambda s: tfd.OrderedLogistic(
                    [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], s
                ),
                ZeroInflatedNegativeBinomial=lambda s: tfd.ZeroInflatedNegativeBinomial(
                    logits=s, total_count=3.0, inflated_loc_logits=0.1
                ),
            ),
            **_of(
                _bits,
                Bernoulli=lambda s: tfd.Bernoulli(logits=s, dtype=tf.float32),
                ProbitBernoulli=lambda s: tfd.ProbitBernoulli(
                    probits=s, dtype=tf.float32
                ),
            ),
            **_of(lambda x: _counts(x) + 1, Zipf=lambda s: tfd.Zipf(1.0 + s)),
        },
        not_sampled={
            "BetaBinomial",
            "NegativeBinomial",
            "ZeroInflatedNegativeBinomial",
            "Zipf",
        },
    ),
    "vectors": Group(
        distributions={
            **_of(
                _pairs,
                MultivariateNormalDiag=lambda s: tfd.MultivariateNormalDiag(
                    [0.1, s], [s, 1.0]
                ),
                MultivariateNormalFullCovariance=lambda s: (
                    tfd.MultivariateNormalFullCovariance([0.1, s], tf.eye(2) * s + 0.3)
                ),
                MultivariateNormalTriL=lambda s: tfd.MultivariateNormalTriL(
                    [0.1, s], tf.linalg.band_part(tf.ones([2, 2]) * s, -1, 0)
                ),
                MultivariateNormalDiagPlusLowRankCovariance=lambda s: (
                    tfd.MultivariateNormalDiagPlusLowRankCovariance(
                        cov_diag_factor=[s, 1.0], cov_perturb_factor=[[0.1], [0.2]]
                    )
                ),
                Independent=lambda s: tfd.Independent(tfd.Normal([0.1, s], s), 1),
                Sample=lambda s: tfd.Sample(tfd.Normal(0.1, s), 2),
                JointDistributionSequential=lambda s: tfd.Blockwise(
                    [tfd.Normal(0.1, s), tfd.Normal(0.2, 1.0)]
                ),
            ),
            **_of(
                _simplex,
                Dirichlet=lambda s: tfd.Dirichlet([s, 1.0, 2.0]),
                RelaxedOneHotCategorical=lambda s: tfd.RelaxedOneHotCategorical(
                    s, logits=[0.1, 0.2, 0.3]
                ),
            ),
            **_of(
                _one_hot,
                OneHotCategorical=lambda s: tfd.OneHotCategorical(
                    logits=tf.stack([s, 0.1, 0.2]), dtype=tf.float32
                ),
                Multinomial=lambda s: tfd.Multinomial(
                    1.0, logits=tf.stack([s, 0.1, 0.2])
                ),
                DirichletMultinomial=lambda s: tfd.DirichletMultinomial(
                    1.0, [s, 1.0, 2.0]
                ),
            ),
            **_of(
                _circle,
                PowerSpherical=lambda s: tfd.PowerSpherical([0.6, 0.8], s),
            ),
        },
        not_sampled={"DirichletMultinomial", "Multinomial", "PowerSpherical"},
    ),
    "matrices": Group(
        distributions=_of(
            _matrices,
            WishartTriL=lambda s: tfd.WishartTriL(3.0, tf.eye(2) * s),
            MatrixNormalLinearOperator=lambda s: tfd.MatrixNormalLinearOperator(
                tf.zeros([2, 2]),
                *[tf.linalg.LinearOperatorDiag(tf.stack([s, 1.0]))] * 2,
            ),
        ),
        not_sampled={"WishartTriL"},
    ),
}
