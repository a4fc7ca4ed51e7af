"""One life of the process that NIXL has to itself, and the lives after it: played by a process that has no NIXL."""

import socket
import threading

import pytest

from contracts.errors import TransferFailed
from kv_transfer import nixl, nixl_life
from kv_transfer.connector import ByteRange
from kv_transfer.nixl import _Lives
from kv_transfer.nixl_life import Life, Start
from kv_transfer.nixl_orders import Begin, Connect, Leave, receive
from kv_transfer.windows import WindowTable


def connect(number):
    return Connect(number, "nixl", "somewhere:1")


class Played:
    """A life that is served by a thread, once it is ready."""

    def __init__(self, act, windows):
        with socket.socket() as door, socket.socket() as memory:  # any two descriptors
            self.life = Life(Start(Begin(1, (1, 1, 1.0, 1.0, 1.0), None, act), memory.fileno(), door.fileno()), windows)
        self.ended = None
        self.thread = threading.Thread(target=self._serve)

    def begin(self):
        self.life.await_ready()
        self.thread.start()
        return self.life

    def _serve(self):
        self.ended = self.life.serve()


@pytest.fixture
def play(monkeypatch):
    """Makes lives, and ends them afterwards."""
    monkeypatch.setattr(nixl_life, "_MODULE", "tests.unit.kv_transfer.nixl_stand_in")
    made = []

    def make(act, windows=None):
        made.append(Played(act, windows or WindowTable()))
        return made[-1]

    yield make
    for played in made:
        played.life.kill()
        if played.thread.ident is None:
            played.life.serve()
        else:
            played.thread.join()


def test_orders_have_outcomes(play):
    life = play("obey").begin()
    assert life.order(connect)[1].result() is None


def test_before_it_is_ready_it_takes_no_orders_and_is_finished_by_a_kill(play):
    played = play("mute")
    with pytest.raises(TransferFailed, match="being started"):
        played.life.order(connect)
    played.life.finish()
    with pytest.raises(TransferFailed, match="does not start"):
        played.life.await_ready()


def test_what_is_left_when_it_ends_fails_and_says_how_it_ended(play):
    played = play("lazy")
    life = played.begin()
    _, waiting = life.order(connect)
    life.kill()
    with pytest.raises(TransferFailed, match="its process was ended by SIGKILL"):
        waiting.result()
    played.thread.join()
    assert played.ended == "was ended by SIGKILL"
    with pytest.raises(TransferFailed):
        life.order(connect)


def test_nobody_is_in_a_window_once_it_has_ended(play):
    windows = WindowTable()
    key = windows.open((ByteRange(0, 1),))
    played = play(str(key), windows)
    life = played.begin()
    life.order(connect)[1].result()  # it has entered twice, and left once
    assert not windows.close(key)
    life.kill()
    played.thread.join()
    assert windows.close(key)


def test_a_window_that_is_left_as_often_as_entered_is_free(play):
    windows = WindowTable()
    key = windows.open((ByteRange(0, 1),))
    life = play(str(key), windows).begin()
    window = windows.get(key)
    life.order(connect)[1].result()
    life._look(Leave(key))
    assert window.close()


def test_an_answer_that_nobody_hears_ends_the_answering_alone(play):
    life = play("deaf").begin()
    assert life.order(connect)[1].result() is None
    life._asked.join()


def test_an_outcome_that_nobody_waits_for_is_dropped(play):
    life = play("obey").begin()
    life._talking.acquire()  # it is not told yet
    told = threading.Thread(target=life.order, args=(connect,))
    told.start()
    while not life._orders:
        pass
    (waiting,) = life._orders.values()
    assert waiting.cancel()
    life._talking.release()
    told.join()
    assert life.order(connect)[1].result() is None


def test_messages_beyond_all_limits_are_refused():
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"\xff" * 4)
        with pytest.raises(OSError, match="beyond all limits"):
            receive(other)
        one.sendall(b"\x05\0\0\0half")
        one.shutdown(socket.SHUT_WR)
        assert receive(other) is None


def test_an_end_with_something_unread_is_an_end():
    one, other = socket.socketpair()
    with one:
        one.sendall(b"unread")
        other.close()
        assert receive(one) is None


def test_a_life_that_begins_while_it_is_closed_is_ended(play, monkeypatch):
    """Closing had found none to end."""
    born, known = threading.Event(), threading.Event()

    class Late(Life):
        def __init__(self, start, windows):
            super().__init__(start, windows)
            born.set()
            known.wait()
            lives._closing.wait()

    monkeypatch.setattr(nixl, "Life", Late)
    with socket.socket() as door, socket.socket() as memory:
        start = Start(Begin(1, (1, 1, 1.0, 1.0, 1.0), None, "obey"), memory.fileno(), door.fileno())
        lives = _Lives(start, WindowTable())
        known.set()
        born.wait()
        lives.close()
