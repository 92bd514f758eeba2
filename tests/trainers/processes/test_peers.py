"""Roll call, loss of a peer, stopping together; processes played by threads here."""

import concurrent.futures
import contextlib
import logging
import random
import signal
import socket
import sys
import threading
import time

import pytest

from meshwright.trainers.processes.peer_channel import Channel
from meshwright.trainers.processes.peer_hub import Hub
from meshwright.trainers.processes.peers import PeerError, Peers
from meshwright.trainers.startup.process_flags import split_address

# Threads that stand for processes end as those do.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)

SECONDS = 60  # Far longer than anything here takes on a loaded machine.


@pytest.fixture(scope="module", autouse=True)
def _end_threads_alone():
    """What loses its supervisor ends: a process, but for here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.trainers.processes.peers._end_process", sys.exit)
        yield
        for thread in threading.enumerate():
            if thread.name == "peers":
                thread.join(SECONDS)


@pytest.fixture
def hub():
    """Starts a hub for so many processes; returns what connects to it."""
    with contextlib.ExitStack() as stack:

        def start(count, timeout=SECONDS):
            server = socket.create_server(("127.0.0.1", 0))
            Hub(server, count, timeout=timeout)
            address = server.getsockname()

            def connect():
                channel = Channel(socket.create_connection(address))
                stack.callback(channel.close)
                return channel

            return connect

        yield start


def peer(channel, count, process, **how):
    how = {"settings": "s", "versions": "v", "start_timeout": SECONDS, **how}
    return Peers(channel, count, process, **how)


def start_all(connect, count):
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        starts = [pool.submit(peer, connect(), count, n) for n in range(count)]
        return [start.result(SECONDS) for start in starts]


def by_hand(connect, count, process):
    """A process that says hello, and then what the test says."""
    channel = connect()
    hello = {"process": process, "count": count, "host": "h", "pid": 7}
    channel.send(**hello, settings="s", versions="v")
    return channel


def heard(channel, key):
    """What a process is told next under `key`."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        message = channel.receive(SECONDS)
        if message is not None and key in message:
            return message[key]
    raise AssertionError(f"no {key} was heard")


def test_all_come_and_leave(hub):
    peers = start_all(hub(3), 3)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for left in [pool.submit(peer.close, SECONDS) for peer in peers]:
            left.result(SECONDS)
    assert all(peer._all_left.is_set() for peer in peers)


def test_the_address_is_free_for_the_runtime_once_all_are_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        Hub(server, 1, timeout=SECONDS)
        channel = Channel(socket.create_connection(address))
        peer(channel, 1, 0)
        with socket.create_server(address):
            pass
        channel.close()


def test_missing_processes_are_named(hub, caplog, monkeypatch):
    hub_module = "meshwright.trainers.processes.peer_hub"
    monkeypatch.setattr(f"{hub_module}._SAY_MISSING_SECONDS", 0.5)
    caplog.set_level(logging.WARNING, logger="absl")
    connect = hub(4)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        starts = [
            pool.submit(peer, connect(), 4, number, start_timeout=4)
            for number in (0, 2)
        ]
        messages = [str(start.exception(SECONDS)) for start in starts]
    for message in messages:
        assert "of 4 processes, these did not come" in message
        assert "1, 3. See what they say" in message
    assert "waiting for process 1, 3 of 4" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": "t"}, "process 1 has other settings than process 0 .*same gin"),
        ({"versions": "w"}, "process 1 has other versions than .*install the"),
        ({"process": 0}, "there is a process 0 already, on h .pid 7.: give each its"),
        ({"process": 2}, "there is no process 2 of 2: they count from 0"),
        ({"count": 3}, "process 1 was started with --num_processes=3, another"),
    ],
)
def test_who_does_not_belong_is_refused(hub, change, message):
    """The others go on waiting for one that does."""
    connect = hub(2)
    first = by_hand(connect, 2, 0)
    heard(first, "missing")
    with pytest.raises(PeerError, match=message):
        peer(connect(), **{"count": 2, "process": 1, **change})
    peer(connect(), 2, 1)
    assert heard(first, "go")


def test_who_leaves_before_all_are_there_may_come_again(hub):
    connect = hub(2)
    first = by_hand(connect, 2, 0)
    by_hand(connect, 2, 1).close()
    assert heard(first, "go")  # Both were there for a moment.
    connect = hub(3)
    first = by_hand(connect, 3, 0)
    second = by_hand(connect, 3, 1)
    heard(second, "missing")
    second.close()
    time.sleep(1)
    by_hand(connect, 3, 1)
    by_hand(connect, 3, 2)
    assert heard(first, "go")


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 5000 + b"\n",
        b"x" * 200_000,
        b'{"process": "a"}\n',
        b'{"beat": true}\n',
        b"null\n",
        b"\xff\n",
        b"",
    ],
)
def test_noise_is_ignored(hub, noise):
    connect = hub(1)
    # Whoever makes noise is hung up on.
    with contextlib.suppress(ConnectionError):
        connect()._connection.sendall(noise)
    assert heard(by_hand(connect, 1, 0), "go")


def test_a_second_knock_in_one_turn_does_no_harm(hub):
    """The hub hears the last hello and a probe of its port at once."""
    connect = hub(1)
    for _ in range(20):
        connect()
    assert heard(by_hand(connect, 1, 0), "go")


def test_long_messages_are_cut_and_heard(hub):
    connect = hub(2)
    first = by_hand(connect, 2, 0)
    second = peer(connect(), 2, 1)
    heard(first, "go")
    second.failed("\x00" * 10**6, at_once=True)
    assert "failed: \x00" in heard(first, "failed")


def test_peer_that_ends_is_named(hub):
    connect = hub(2)
    first, second = (by_hand(connect, 2, number) for number in range(2))
    heard(first, "go")
    second.close()
    lost = "process 1 of 2 (h, pid 7) ended without a word"
    assert heard(first, "lost") == lost


def test_what_fails_on_one_is_told_to_all(hub):
    connect = hub(2)
    first, second = (by_hand(connect, 2, number) for number in range(2))
    heard(first, "go")
    second.send(failed="OSError: no such file")
    failed = "process 1 of 2 (h, pid 7) failed: OSError: no such file"
    assert heard(first, "failed") == failed


def beating(channel, ended, **message):
    """Says something now and then, until `ended`."""

    def beat():
        while not ended.wait(0.2):
            channel.send(beat=True, **message)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    return thread


def test_silent_peer_is_named(hub):
    connect, ended = hub(2, timeout=2), threading.Event()
    first, _ = (by_hand(connect, 2, number) for number in range(2))
    heard(first, "go")
    thread = beating(first, ended)
    lost = heard(first, "lost")
    assert "process 1 of 2 (h, pid 7) has not been heard of for" in lost
    ended.set()
    thread.join()


def test_peer_that_keeps_others_waiting_is_named(hub):
    connect, ended = hub(2, timeout=2), threading.Event()
    first, second = (by_hand(connect, 2, number) for number in range(2))
    heard(first, "go")
    threads = [beating(first, ended, arrivals=1), beating(second, ended)]
    lost = heard(first, "lost")
    ended.set()
    for thread in threads:
        thread.join()
    assert "process 1 of 2 (h, pid 7) has kept the others waiting for" in lost


@pytest.mark.parametrize("seed", range(3))
def test_all_stop_before_the_same_call(hub, seed):
    """Processes run ahead of each other by a call, as with one call in flight."""
    count, rng = 3, random.Random(seed)
    peers = start_all(hub(count), count)
    begun, changed = [0] * count, threading.Condition()
    asks = {rng.randrange(count): rng.randrange(5, 20)}

    def run(number):
        while True:
            event = signal.SIGTERM if begun[number] >= asks.get(number, 9**9) else None
            if (stop := peers[number].stop_reached(event)) is not None:
                assert stop == signal.SIGTERM
                # It stays so.
                assert peers[number].stop_reached(None) == signal.SIGTERM
                return begun[number]
            with changed:
                begun[number] += 1
                changed.notify_all()
                # Results of the call before need all to have begun it.
                assert changed.wait_for(
                    lambda: min(begun) >= begun[number] - 1, SECONDS
                )

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        runs = [pool.submit(run, number) for number in range(count)]
        ends = [run.result(SECONDS) for run in runs]
    assert len(set(ends)) == 1
    assert ends[0] > min(asks.values())


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:99999"])
def test_addresses(address):
    with pytest.raises(ValueError, match="is no HOST:PORT: give the address of proces"):
        split_address(address)


def test_addresses_of_every_kind():
    assert split_address("host.net:12") == ("host.net", 12)
    assert split_address("[::1]:12") == ("::1", 12)
