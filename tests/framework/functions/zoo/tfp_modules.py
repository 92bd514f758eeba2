"""TensorFlow Probability's parts in a step each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
import tf_keras

from tests.framework.functions.zoo.tfp_distributions import GROUPS, Group
from tests.framework.functions.zoo.zoo_cases import (
    ROWS,
    Case,
    Made,
    descend,
    trained,
    weighed,
)

tfb, tfd, tfl = tfp.bijectors, tfp.distributions, tfp.layers
FEW = 3
"""Steps of chains and optimizers: rounding grows with each."""


def _distributions(group: Group) -> Case:
    """Log probabilities, samples where XLA has them, and gradients of both."""

    def made(x) -> Made:
        scale, count = tf.Variable(0.7), tf.Variable([3, 5])

        def step(x):
            count.assign_add([1, 0])
            results = {}
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                for name, (make, support) in group.distributions.items():
                    distribution = make(scale)
                    results[name] = [distribution.log_prob(support(x))]
                    if name not in group.not_sampled:
                        results[name] += [distribution.sample(8, seed=count)]
                losses = {name: weighed(result) for name, result in results.items()}
            gradients = {
                name: tape.gradient(loss, [scale, x], unconnected_gradients="zero")
                for name, loss in losses.items()
            }
            total = tf.add_n([g[0] for g in gradients.values()])
            scale.assign_sub(0.01 * tf.tanh(total))
            return results, gradients

        return step, lambda: [scale, count]

    return Case(make=made, shapes=[()])


def _bijector(make: Callable[[], Any], **options: Any) -> Case:
    """The density of a transformed normal distribution, which is trained."""

    def made(*inputs) -> Made:
        tf_keras.utils.set_random_seed(1)
        base = tfd.MultivariateNormalDiag(tf.zeros([4]))
        flow = tfd.TransformedDistribution(base, make())
        seed = tf.Variable([1, 2])

        def call(x):
            seed.assign_add([1, 0])
            return [flow.log_prob(x), flow.sample(ROWS, seed=seed)]

        return trained(
            call,
            inputs,
            trainable=lambda: flow.trainable_variables,
            variables=lambda: [*flow.trainable_variables, seed],
        )

    return Case(make=made, shapes=[(4,)], **options)


def _real_nvp() -> Any:
    layers = tf_keras.Sequential(
        [tf_keras.layers.Dense(8, "tanh"), tf_keras.layers.Dense(4)]
    )
    layers.build([None, 2])

    def shift_and_log_scale(x, units):
        out = layers(x)
        return out[..., :units], tf.tanh(out[..., units:])

    flow = tfb.RealNVP(num_masked=2, shift_and_log_scale_fn=shift_and_log_scale)
    flow.layers = layers  # So their variables are the bijector's.
    return flow


def _masked_autoregressive() -> Any:
    network = tfb.AutoregressiveNetwork(
        params=2, hidden_units=[8], event_shape=[4], activation="tanh"
    )
    network.build([None, 4])
    return tfb.MaskedAutoregressiveFlow(network)


def _spline() -> Any:
    return tfb.RationalQuadraticSpline(
        bin_widths=tf.ones([4, 4]) * 2,
        bin_heights=tf.ones([4, 4]) * 2,
        knot_slopes=tf.Variable(tf.ones([4, 3]) * 1.5),
        range_min=-4,
    )


def _small_noise(**_: Any) -> Any:
    """A posterior whose samples are its mean but for rounding.

    Layers draw them by stateful ops, of which TF's jit makes other numbers each time.
    """
    return tfl.default_mean_field_normal_fn(
        untransformed_scale_initializer=tf.constant_initializer(-30.0)
    )


def _keras_layer(make: Callable[[], Any], *shape: int, **options: Any) -> Case:
    """Results of a layer, or moments of a distribution that it returns, and losses."""

    def made(*inputs) -> Made:
        tf_keras.utils.set_random_seed(1)
        layer = make()

        def call(x):
            out = layer(x)
            if isinstance(out, tfd.Distribution):
                out = [out.log_prob(tf.stop_gradient(out.mean()) * 0.9), out.mean()]
            return out, layer.losses

        return trained(
            call,
            inputs,
            trainable=lambda: layer.trainable_variables,
            variables=lambda: layer.variables,
        )

    return Case(make=made, shapes=[shape], **options)


def _variational(name: str, *args: Any) -> Callable[[], Any]:
    how = (
        {}
        if "Reparam" not in name and "Flipout" not in name
        else {"bias_posterior_fn": _small_noise(is_singular=True)}
    )
    return lambda: getattr(tfl, name)(*args, kernel_posterior_fn=_small_noise(), **how)


def _dense_variational() -> Any:
    def posterior(kernel, bias, dtype=None):
        count = kernel + bias
        return tf_keras.Sequential(
            [
                tfl.VariableLayer(count, dtype=dtype, initializer="ones"),
                tfl.DistributionLambda(
                    lambda t: tfd.Independent(tfd.Normal(t, 1e-7), 1)
                ),
            ]
        )

    def prior(kernel, bias, dtype=None):
        return tf_keras.Sequential(
            [
                tfl.VariableLayer(kernel + bias, dtype=dtype),
                tfl.DistributionLambda(
                    lambda t: tfd.Independent(tfd.Normal(t, 1.0), 1)
                ),
            ]
        )

    return tfl.DenseVariational(4, posterior, prior, kl_weight=0.1)


def _density(layer: str, units: int, *args: Any) -> Callable[[], Any]:
    """A dense layer whose results parametrize a distribution."""

    def make() -> Any:
        return tf_keras.Sequential(
            [
                tf_keras.layers.Dense(units),
                getattr(tfl, layer)(*args, convert_to_tensor_fn=tfd.Distribution.mean),
            ]
        )

    return make


def _target(x: tf.Tensor) -> tf.Tensor:
    """The log density of rows [..., 2]: a bent ridge."""
    return -0.5 * (x[..., 0] ** 2 + (x[..., 1] - 0.5 * x[..., 0] ** 2) ** 2)


def _chain(make: Callable[[], Any], **options: Any) -> Case:
    """Some steps of a Markov chain for each row."""

    def made(_) -> Made:
        seed = tf.Variable([7, 11])

        def step(start):
            seed.assign_add([0, 1])
            return tfp.mcmc.sample_chain(
                FEW, start, kernel=make(), seed=seed, trace_fn=None
            )

        return step, lambda: [seed]

    return Case(make=made, shapes=[(2,)], **options)


def _stepwise(
    fn: Callable[..., Any],
    *shapes: tuple[int, ...],
    variable: Any = None,
    **options: Any,
) -> Case:
    """A function with gradients by its inputs, and by one variable."""

    def made(*inputs) -> Made:
        kept = [tf.Variable(variable)] if variable is not None else []
        return trained(lambda *x: fn(*x, *kept), inputs, trainable=lambda: kept)

    return Case(make=made, shapes=shapes, **options)


def _surrogate() -> Case:
    """Variational inference: steps of a loss with reparameterized samples."""

    def made(x) -> Made:
        loc, raw, seed = (
            tf.Variable([0.1, 0.2]),
            tf.Variable([0.0, 0.0]),
            tf.Variable([1, 2]),
        )

        def step(x):
            seed.assign_add([1, 0])
            with tf.GradientTape() as tape:
                posterior = tfd.MultivariateNormalDiag(loc, tf.nn.softplus(raw))
                loss = tfp.vi.monte_carlo_variational_loss(
                    lambda z: tf.reduce_sum(_target(x[:, None] - z), 0),
                    posterior,
                    sample_size=16,
                    seed=seed,
                )
            gradients = tape.gradient(loss, [loc, raw])
            descend(gradients, [loc, raw])
            return loss, gradients

        return step, lambda: [loc, raw, seed]

    return Case(make=made, shapes=[(2,)])


def _gaussian_process(x: tf.Tensor, y: tf.Tensor, width: tf.Variable) -> Any:
    kernel = tfp.math.psd_kernels.ExponentiatedQuadratic(1.0, tf.exp(width))
    process = tfd.GaussianProcess(kernel, x, observation_noise_variance=0.3)
    regression = tfd.GaussianProcessRegressionModel(
        kernel, x + 0.1, x, y, observation_noise_variance=0.3
    )
    return [process.log_prob(y), regression.mean(), regression.variance()]


def _hidden_markov(x: tf.Tensor, logits: tf.Variable) -> Any:
    model = tfd.HiddenMarkovModel(
        tfd.Categorical(logits=[0.1, 0.2, 0.3]),
        tfd.Categorical(logits=tf.convert_to_tensor(logits)),
        tfd.Normal([-1.0, 0.0, 1.0], 1.0),
        num_steps=5,
    )
    return [model.log_prob(x), model.posterior_marginals(x).probs_parameter()]


def _state_space(x: tf.Tensor, noise: tf.Variable) -> Any:
    model = tfd.LinearGaussianStateSpaceModel(
        num_timesteps=5,
        transition_matrix=tf.constant([[1.0, 1.0], [0.0, 1.0]]),
        transition_noise=tfd.MultivariateNormalDiag(
            scale_diag=tf.stack([tf.exp(noise), 0.1])
        ),
        observation_matrix=tf.constant([[1.0, 0.0]]),
        observation_noise=tfd.MultivariateNormalDiag(scale_diag=[0.5]),
        initial_state_prior=tfd.MultivariateNormalDiag(scale_diag=[1.0, 1.0]),
    )
    filtered = model.forward_filter(x[..., None])
    return [filtered.log_likelihoods, filtered.filtered_means]


def _time_series(x: tf.Tensor) -> Any:
    model = tfp.sts.Sum(
        [tfp.sts.LocalLinearTrend(name="trend"), tfp.sts.Seasonal(3, name="season")],
        constant_offset=0.0,
        observation_noise_scale_prior=tfd.LogNormal(0.0, 1.0),
    )
    series = x[..., None]
    return model.joint_distribution(series).log_prob(
        observation_noise_scale=1.0,
        **{
            "trend/_level_scale": 0.5,
            "trend/_slope_scale": 0.3,
            "season/_drift_scale": 0.2,
        },
    )


def _minimized(minimize: Callable[..., Any], **options: Any) -> Case:
    """A minimizer in each row of a batch, of a function of all rows of data."""

    def made(_) -> Made:
        steps = tf.Variable(0)

        def step(x):
            steps.assign_add(1)
            out = minimize(x)
            return [out.position, out.objective_value]

        return step, lambda: [steps]

    return Case(make=made, shapes=[(2,)], **options)


def _bowl(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum((x - 1.0) ** 2 * [1.0, 4.0], -1) + tf.reduce_sum(x, -1) ** 4


def _with_gradient(x: tf.Tensor) -> Any:
    return tfp.math.value_and_gradient(_bowl, x)


def _solved(_: tf.Tensor) -> Made:
    """A differential equation, whose rate is trained by the solution's size."""
    rate = tf.Variable(0.1)

    def step(x):
        states = (
            tfp.math.ode.DormandPrince()
            .solve(
                lambda t, y: -tf.exp(rate) * y + tf.sin(t),
                0.0,
                x,
                solution_times=[0.5, 1.0],
            )
            .states
        )
        rate.assign_sub(0.1 * tf.reduce_mean(states**2))
        return states

    return step, lambda: [rate]


MCMC = tfp.mcmc
MODULES: dict[str, Case] = {
    **{f"distributions: {n}": _distributions(group) for n, group in GROUPS.items()},
    "DenseFlipout": _keras_layer(_variational("DenseFlipout", 4), 8),
    "DenseReparameterization": _keras_layer(
        _variational("DenseReparameterization", 4),
        8,
        layout={"kernel": [None, "model"]},
    ),
    "DenseLocalReparameterization": _keras_layer(
        _variational("DenseLocalReparameterization", 4), 8
    ),
    "Convolution1DFlipout": _keras_layer(
        _variational("Convolution1DFlipout", 4, 3), 6, 2
    ),
    "Convolution2DReparameterization": _keras_layer(
        _variational("Convolution2DReparameterization", 4, 3), 6, 6, 2
    ),
    "DenseVariational": _keras_layer(_dense_variational, 8),
    "IndependentNormal": _keras_layer(_density("IndependentNormal", 8, 4), 8),
    "IndependentBernoulli": _keras_layer(_density("IndependentBernoulli", 4, 4), 8),
    "MixtureNormal": _keras_layer(_density("MixtureNormal", 27, 3, 4), 8),
    "MultivariateNormalTriL": _keras_layer(
        _density("MultivariateNormalTriL", 14, 4), 8
    ),
    "RealNVP": _bijector(_real_nvp),
    "MaskedAutoregressiveFlow": _bijector(_masked_autoregressive),
    "RationalQuadraticSpline": _bijector(_spline),
    "ScaleMatvecTriL": _bijector(
        lambda: tfb.ScaleMatvecTriL(scale_tril=tf.Variable(np.tri(4, dtype=np.float32)))
    ),
    "Chain": _bijector(
        lambda: tfb.Chain(
            [
                tfb.Shift(tf.Variable([0.1, 0.2, 0.3, 0.4])),
                tfb.SinhArcsinh(skewness=tf.Variable(0.2)),
                tfb.Permute([2, 0, 3, 1]),
                tfb.Scale(tf.Variable(1.5)),
            ]
        )
    ),
    "HamiltonianMonteCarlo": _chain(
        lambda: MCMC.HamiltonianMonteCarlo(_target, 0.2, 2)
    ),
    "NoUTurnSampler": _chain(
        lambda: MCMC.NoUTurnSampler(_target, 0.2, max_tree_depth=3)
    ),
    "MetropolisAdjustedLangevinAlgorithm": _chain(
        lambda: MCMC.MetropolisAdjustedLangevinAlgorithm(_target, 0.2)
    ),
    "RandomWalkMetropolis": _chain(lambda: MCMC.RandomWalkMetropolis(_target)),
    "SliceSampler": _chain(lambda: MCMC.SliceSampler(_target, 0.5, 3)),
    "ReplicaExchangeMC": _chain(
        lambda: MCMC.ReplicaExchangeMC(
            _target, [1.0, 0.5], lambda fn: MCMC.HamiltonianMonteCarlo(fn, 0.2, 2)
        )
    ),
    "DualAveragingStepSizeAdaptation": _chain(
        lambda: MCMC.DualAveragingStepSizeAdaptation(
            MCMC.HamiltonianMonteCarlo(_target, 0.2, 2), 2
        )
    ),
    "monte_carlo_variational_loss": _surrogate(),
    "GaussianProcess": _stepwise(_gaussian_process, (1,), (), variable=0.3),
    "HiddenMarkovModel": _stepwise(
        _hidden_markov, (5,), variable=np.eye(3, dtype=np.float32)
    ),
    "LinearGaussianStateSpaceModel": _stepwise(_state_space, (5,), variable=0.1),
    "sts.Sum": _stepwise(_time_series, (6,)),
    "lbfgs_minimize": _minimized(
        lambda x: tfp.optimizer.lbfgs_minimize(_with_gradient, x, max_iterations=FEW)
    ),
    "bfgs_minimize": _minimized(
        lambda x: tfp.optimizer.bfgs_minimize(_with_gradient, x, max_iterations=FEW)
    ),
    "nelder_mead_minimize": _minimized(
        lambda x: tfp.optimizer.nelder_mead_minimize(
            _bowl, initial_vertex=x[0], max_iterations=2 * FEW
        )
    ),
    "DormandPrince": Case(make=_solved, shapes=[(2,)]),
}


def _distribution(
    make: Callable[..., Any], support: Callable[..., Any], is_sampled: bool
) -> Case:
    not_sampled = set() if is_sampled else {"it"}
    return _distributions(
        Group(distributions={"it": (make, support)}, not_sampled=not_sampled)
    )


_NO_SIZE = "requires a fixed tensor list size"
NO_JIT: dict[str, tuple[Case, str]] = {
    "Bates": (_distribution(lambda s: tfd.Bates(3.0), tf.sigmoid, False), "SegmentSum"),
    "LambertWNormal": (
        _distribution(lambda s: tfd.LambertWNormal(0.0, s, 0.1), tf.identity, False),
        _NO_SIZE,
    ),
    "Skellam": (
        _distribution(
            lambda s: tfd.Skellam(s, 1.0), lambda x: tf.floor(tf.abs(x)), False
        ),
        _NO_SIZE,
    ),
    "VonMisesFisher": (
        _distribution(
            lambda s: tfd.VonMisesFisher([0.6, 0.8], s),
            lambda x: tf.stack([tf.cos(x), tf.sin(x)], -1),
            False,
        ),
        _NO_SIZE,
    ),
    "samples of a NegativeBinomial": (
        _distribution(lambda s: tfd.NegativeBinomial(3.0, logits=s), tf.abs, True),
        "Gamma",
    ),
    "samples of a Multinomial": (
        _distribution(
            lambda s: tfd.Multinomial(1.0, logits=tf.stack([s, 0.1])),
            lambda x: tf.one_hot(tf.cast(x > 0, tf.int32), 2),
            True,
        ),
        _NO_SIZE,
    ),
}
"""What TF itself does not compile with its gradients, and what it says."""
