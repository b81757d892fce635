"""A network of machines on one: namespaces, joined by a switch of our own that delays and loses.

Each machine is a network namespace with a TUN device, and so is the one in which the tests run. The
switch reads the packets that a machine sends, and writes them to the device of the receiver: later,
or not at all. It also keeps them, as a listener on the wire would.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_BYTES = 2**16


def is_possible() -> bool:
    """Whether namespaces and devices can be made here."""
    tun = Path("/dev/net/tun")
    return os.geteuid() == 0 and tun.exists() and os.access(tun, os.W_OK) and _has_ip()


def _has_ip() -> bool:
    with suppress(FileNotFoundError):
        return subprocess.run(["ip", "-V"], capture_output=True, check=False).returncode == 0
    return False


class Machine:
    """One end of the network."""

    def __init__(self, number: int, *, is_here: bool) -> None:
        """Make the device, in a namespace of its own unless it `is_here`."""
        # Another process may have a network here at the same time.
        self.address = f"10.77.{os.getpid() % 255}.{number}"
        self.namespace = None if is_here else f"troika-{os.getpid()}-{number}"
        self._device = f"tk{os.getpid() % 10**6}-{number}"
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _IFF_TUN | _IFF_NO_PI
        fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH", self._device.encode(), flags))
        if self.namespace is not None:
            _run("ip", "netns", "add", self.namespace)
            _run("ip", "link", "set", self._device, "netns", self.namespace)
            self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "address", "add", f"{self.address}/24", "dev", self._device)
        self._run("ip", "link", "set", self._device, "up")

    @property
    def prefix(self) -> list[str]:
        """Words in front of a command that is to run there."""
        return [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]

    def _run(self, *command: str) -> None:
        _run(*self.prefix, *command)

    def close(self) -> None:
        os.close(self.fd)  # the device goes with it
        if self.namespace is not None:
            _run("ip", "netns", "delete", self.namespace)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)


class Network:
    """Machines and the switch between them; the first machine is this one."""

    def __init__(self, num_machines: int, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """`delay_s` of each packet, and the share of them that is lost."""
        self._delay_s, self._loss = delay_s, loss
        self._random = random.Random(1)
        self._cut: frozenset[int] = frozenset()
        self._seen = bytearray()
        self.num_lost = 0
        self._stack = ExitStack()
        self.machines: list[Machine] = []
        try:
            for number in range(num_machines):
                machine = Machine(number + 1, is_here=number == 0)
                self._stack.callback(machine.close)
                self.machines.append(machine)
        except BaseException:
            self._stack.close()
            raise
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._stack.close()

    def cut(self, *numbers: int) -> None:
        """Let nothing pass to and from these machines; without any, the network is whole again."""
        self._cut = frozenset(numbers)

    def has_seen(self, content: bytes) -> bool:
        """Whether these bytes were in a packet."""
        return content in self._seen

    def _forward(self) -> None:
        poller = select.poll()
        fds = {machine.fd: number for number, machine in enumerate(self.machines)}
        for fd in fds:
            poller.register(fd, select.POLLIN)
        due: list[tuple[float, int, int, bytes]] = []
        num_packets = 0
        while not self._ends.is_set():
            now = time.monotonic()
            wait_s = min(max(due[0][0] - now, 0.0), 0.05) if due else 0.05
            for fd, _ in poller.poll(wait_s * 1000):
                for packet in _packets(fd):
                    num_packets += 1
                    self._seen += packet
                    target = packet[19] - 1  # the last byte of the receiver's address
                    if packet[0] >> 4 == 4 and 0 <= target < len(self.machines):
                        at = time.monotonic() + self._delay_s
                        heapq.heappush(due, (at, num_packets, fds[fd] << 8 | target, packet))
            while due and due[0][0] <= time.monotonic():
                _, _, ends, packet = heapq.heappop(due)
                self._deliver(ends >> 8, ends & 0xFF, packet)

    def _deliver(self, source: int, target: int, packet: bytes) -> None:
        if source in self._cut or target in self._cut or self._random.random() < self._loss:
            self.num_lost += 1
            return
        with suppress(OSError):  # the device's queue is full: a lost packet, too
            os.write(self.machines[target].fd, packet)


def _packets(fd: int) -> "list[bytes]":
    packets = []
    with suppress(BlockingIOError):
        while len(packets) < 64:
            packets.append(os.read(fd, _MAX_BYTES))
    return packets
