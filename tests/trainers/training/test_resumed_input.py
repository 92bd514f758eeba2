"""Where a run that resumes goes on in the examples of a dataset."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.modeling.optimizers.optimizer import SGD
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks import DatasetInput, Resume, Task, TaskLoss
from meshwright.trainers.checkpoints.checkpoints import Checkpoints
from meshwright.trainers.experiment.batches import CallBatches
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.not_finite import NotFinite
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import loop

ROWS = 4
COUNT = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remembering(Task):
    """A task whose losses say which examples it has had."""

    input: DatasetInput

    def weights(self):
        spec = mw.WeightSpec(shape=(), dims=(), initializer=mw.Constant(1.0))
        return mw.NestedMap(scale=spec)

    def loss(self, ctx, theta, batch):
        loss = theta.scale * tf.reduce_mean(batch.x)
        return TaskLoss(loss=loss, sums=mw.NestedMap(loss=loss))

    def metrics(self, sums):
        return {}


def numbers(count=COUNT):
    return (
        tf.data.Dataset.range(count).shuffle(count).map(lambda x: tf.cast(x, "float32"))
    )


def given(resume=Resume.STATE, seed=0, train=numbers):
    return DatasetInput(train=train, seed=seed, resume=resume)


def experiment(data, **fields):
    return Experiment(
        task=Remembering(input=data),
        plan=mw.ShardingPlan(mesh_shape=(2, 1), activations={"batch": "X"}),
        optimizer=SGD(learning_rate=0.0),
        **{"global_batch": ROWS, "num_steps": 8, "checkpoint_interval": 4, **fields},
    )


def losses(folder, data, **fields):
    run = loop.Run(model_dir=str(folder), evaluate=False)
    programs = StepPrograms(experiment(data, **fields))
    return list(loop.train_and_evaluate(programs, run).losses.values())


def means(data, count, start=0):
    batches = data.train_batches(start, global_batch=ROWS, rows=range(ROWS))
    return [float(np.mean(batch["x"])) for batch in batches.take(count)]


def test_the_state_of_the_iterator_is_in_the_checkpoint(tmp_path):
    """After another seed the examples are those of the old order, so they were kept."""
    want = means(given(seed=1), 20)
    assert losses(tmp_path, given(seed=1)) == want[:8]
    assert losses(tmp_path, given(seed=2), num_steps=12) == want[8:12]
    # It does not depend on how many steps a call makes.
    changed = {"num_steps": 20, "steps_per_loop": 4, "summary_interval": 4}
    assert losses(tmp_path, given(seed=3), **changed) == want[12:20]


def test_by_default_a_run_skips_what_it_has_read_and_anew_it_begins_at_the_start(
    tmp_path,
):
    want = means(given(seed=1), 16)
    by_step, anew = (given(resume, seed=1) for resume in (Resume.STEP, Resume.ANEW))
    assert losses(tmp_path, by_step) == want[:8]
    assert losses(tmp_path, by_step, num_steps=12) == want[8:12]
    # The new pass draws other numbers than the one before.
    assert losses(tmp_path, anew, num_steps=16) == means(given(seed=1 + 12), 4)


def test_a_checkpoint_without_a_state_is_skipped_to(tmp_path, caplog):
    want = means(given(seed=1), 16)
    assert losses(tmp_path, given(Resume.STEP, seed=1)) == want[:8]
    assert losses(tmp_path, given(seed=1), num_steps=12) == want[8:12]
    assert "step 8 has no state of the input: reads 8 batches" in caplog.text
    assert losses(tmp_path, given(seed=2), num_steps=16) == want[12:]


def test_a_roll_back_goes_on_with_what_comes_next(change_batches, tmp_path):
    """One call was under way when the bad one was seen: its batch is passed too."""

    def poison(step, batches):
        if step == 6 and not seen:
            seen.append(step)
            batches.x[:] = np.inf

    seen = []
    change_batches(poison)
    got = losses(tmp_path, given(), not_finite=NotFinite.ROLL_BACK)
    want = means(given(), 11)
    assert got in (want[:4] + want[6:10], want[:4] + want[7:11])


def read(calls, count):
    return [next(calls)["x"].tolist() for _ in range(count)]


def test_batches_that_were_put_back_are_read_again():
    of = experiment(given(), steps_per_loop=2)
    calls = CallBatches(of, 0, range(ROWS))
    first, second, third = read(calls, 3)
    calls.put_back()
    state = calls.state()
    (again,) = read(CallBatches(of, 6, range(1, 3), state), 1)
    assert again == [row[1:3] for row in third] and third != second != first
    assert read(calls, 1) == [third]
    rest = CallBatches(experiment(given()), 6, range(ROWS), state)
    assert read(rest, 2) == [[row] for row in third]


def test_many_batches_come_back_in_their_order(tmp_path):
    """Names of more than ten sort as `batch_1, batch_10, batch_2`."""
    every = dict.fromkeys(["checkpoint_interval", "summary_interval"], 12)
    of = experiment(given(), steps_per_loop=12, num_steps=24, **every)
    calls = CallBatches(of, 0, range(ROWS))
    (wanted,) = read(calls, 1)
    calls.put_back()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, NestedMap(w=jnp.ones([2])), input_state=calls.state())
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.input_state(1)
    assert read(CallBatches(of, 1, range(ROWS), state), 1) == [wanted]


def test_a_changed_dataset_is_warned_of(tmp_path, caplog):
    losses(tmp_path, given())
    losses(tmp_path, given(train=lambda: numbers(300)), num_steps=12)
    assert "(DatasetInput.train, the dataset of DatasetInput.train): ex" in caplog.text


def drawn():
    return numbers().map(lambda x: x + tf.random.uniform([]))


def generated():
    spec = tf.TensorSpec([], tf.float32)
    return tf.data.Dataset.from_generator(lambda: iter([1.0]), output_signature=spec)


@pytest.mark.parametrize(
    ("train", "op"), [(drawn, "RandomUniform"), (generated, "PyFunc")]
)
def test_what_tf_data_cannot_save_is_refused_at_the_start(train, op):
    message = rf"{op} is stateful.*leave DatasetInput.resume"
    with pytest.raises(ValueError, match=message):
        CallBatches(experiment(given(train=train)), 0, range(ROWS))


def test_a_state_of_other_batches_is_refused():
    state = CallBatches(experiment(given()), 0, range(ROWS)).state()
    larger = experiment(given(), global_batch=8)
    with pytest.raises(ValueError, match="global_batch = 4, and .* cannot be 8 now"):
        CallBatches(larger, 0, range(8), state)
    reshaped = [lambda x: tf.reshape(x, [1]), lambda x: tf.cast(x, tf.int32)]
    shapes = [lambda f=f: numbers().map(f) for f in reshaped]
    for train in (lambda: numbers().take(20).cache(), *shapes):
        other = experiment(given(train=train))
        with pytest.raises(ValueError, match="for another dataset than DatasetInput"):
            CallBatches(other, 0, range(ROWS), state)
