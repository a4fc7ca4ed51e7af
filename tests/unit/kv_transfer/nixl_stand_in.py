"""Stands in for `kv_transfer.nixl_process`, without NIXL: does what its log level says. Run by test_nixl_life.py."""

import socket
import sys

from kv_transfer.nixl_orders import BEGINS, ORDERS, Ask, Done, Enter, Leave, Ready, pack, receive

orders, windows = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])


def ask(question):
    windows.sendall(pack(question))
    return receive(windows)


def deaf():
    """Asks, and does not listen to the answer."""
    windows.shutdown(socket.SHUT_RD)
    windows.sendall(pack(Ask(1)))


def twice(key):
    """Enters a window twice, leaves it once."""
    for question in (Enter(key), Enter(key), Leave(key)):
        ask(question)


act = BEGINS.decode(receive(orders)).log_level
if act != "mute":
    orders.sendall(pack(Ready()))
while True:
    raw = receive(orders)
    if raw is None:
        break
    order = ORDERS.decode(raw)
    if act == "deaf":
        deaf()
    elif act.isdigit():
        twice(int(act))
    if act != "lazy":
        orders.sendall(pack(Done(order.number, None)))
