"""Adapters: which are served, which are in the device's slots, and what waits for a slot.

An adapter is open while it has a slot: its sequences are in the queue like all others. Where more adapters are asked
for than there are slots, sequences of the others are held apart, so that they block nobody. Those adapters wait in the
order in which they were first asked for, and for each of them one open adapter closes, that which was opened first: it
takes no further sequences, and its slot goes on once the last of them has ended. After PATIENCE_S they are preempted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minisgl_backend.adapters.served import NO_ADAPTER, ServedAdapter
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.policy import WaitingQueue
from minisgl_backend.scheduler.sequence import Sequence as Answer
from minisgl_backend.scheduler.sequence import SequenceState

PATIENCE_S = 5.0  # for which an adapter waits at most until sequences of another one give way


@dataclass(frozen=True)
class AdapterStats:
    """One adapter that requests may name and that the host has."""

    slots: int  # that it has: 0 or 1
    running: int  # sequences
    waiting: int


class AdapterBook:
    """The adapters that requests may name, and the slot of each that has one. The runner has filled the slots in the
    order of the adapters.

    Each has a number of its own, a generation: a name that is given to another adapter gets another number, and the
    sequences that came before end with the old one. The host has a number's factors until `take_dropped` returns it.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._by_name = OrderedDict((one.name, one) for one in limits.adapters)  # the one asked for last is last
        self.num_slots = limits.num_adapter_slots
        self._free = list(range(limits.num_adapter_slots, len(limits.adapters), -1))
        slots = range(1, limits.num_adapter_slots + 1)
        # By number; the one that was opened first comes first.
        self._slots = OrderedDict((one.number, slot) for one, slot in zip(limits.adapters, slots, strict=False))
        self._loads: list[tuple[int, int]] = []
        self.num_loads = len(self._slots)  # since the start, the first ones among them
        self._next_number = len(limits.adapters)
        self._sequences: Counter[int] = Counter()  # by number, those that have not ended
        self._retired: set[int] = set()  # which no name stands for; there until their last sequence has ended
        self._dropped: list[int] = []

    def new_number(self) -> int:
        """One that no adapter has had."""
        self._next_number += 1
        return self._next_number - 1

    @property
    def names(self) -> list[str]:
        """The one asked for last is last."""
        return list(self._by_name)

    @property
    def num_on_host(self) -> int:
        """Adapters that requests may name, and those whose last sequences have not ended."""
        return len(self._by_name) + len(self._retired)

    def get(self, name: str) -> ServedAdapter | None:
        """None: it is not served."""
        return self._by_name.get(name)

    def find(self, name: str) -> ServedAdapter:
        """Raises InvalidRequestError."""
        if (found := self._by_name.get(name)) is None:
            names = ", ".join(self._by_name) or ("none now" if self.num_slots else "none, as adapters are off")
            raise InvalidRequestError(f"lora_name is {name[:200]!r}, which is not served; allowed: {names}")
        self._by_name.move_to_end(name)
        return found

    def serve(self, adapter: ServedAdapter) -> None:
        """From now on its name stands for it, and no more for another."""
        self.remove(adapter.name)
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> bool:
        """No request may name it from now on; those that have done so end with it. False: there is none."""
        if (found := self._by_name.pop(name, None)) is None:
            return False
        self._retired.add(found.number)
        self._drop_unused(found.number)
        return True

    def remove_idle(self) -> str | None:
        """Removes the one without sequences that was asked for longest ago, and returns its name; None: all have
        some."""
        if (name := self._idle()) is not None:
            self.remove(name)
        return name

    @property
    def has_idle(self) -> bool:
        """Whether `remove_idle` has one to remove."""
        return self._idle() is not None

    def _idle(self) -> str | None:
        return next((name for name, one in self._by_name.items() if not self._sequences[one.number]), None)

    def stats(self, rows: Sequence[Answer | None]) -> dict[str, AdapterStats]:
        """By name. rows: the sequences that have one."""
        running = Counter(one.adapter.number for one in rows if one is not None and one.adapter is not NO_ADAPTER)
        return {
            name: AdapterStats(
                int(number in self._slots), running[number], max(0, self._sequences[number] - running[number])
            )
            for name, number in ((name, one.number) for name, one in self._by_name.items())
        }

    def note_begin(self, adapter: ServedAdapter, count: int) -> None:
        """So many sequences with it are in the scheduler."""
        self._sequences[adapter.number] += count

    def note_end(self, adapter: ServedAdapter) -> None:
        """One of them has ended."""
        self._sequences[adapter.number] -= 1
        self._drop_unused(adapter.number)

    def take_dropped(self) -> list[int]:
        """The numbers of adapters that nothing will ask for again, each once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _drop_unused(self, number: int) -> None:
        if self._sequences[number]:
            return
        del self._sequences[number]
        if number in self._retired:
            self._retired.discard(number)
            self._loads = [load for load in self._loads if load[1] != number]
            if (slot := self._slots.pop(number, None)) is not None:
                self._free.append(slot)
            self._dropped.append(number)

    def slot_of(self, adapter: ServedAdapter) -> int:
        """Of one that is open."""
        return self._slots[adapter.number]

    def opened(self) -> list[int]:
        """The numbers of those with a slot, in the order in which they were opened."""
        return list(self._slots)

    def is_open(self, number: int) -> bool:
        return number in self._slots

    def note_use(self, number: int) -> None:
        """It counts as opened now."""
        self._slots.move_to_end(number)

    def open(self, number: int, used: set[int]) -> bool:
        """Gives an adapter a slot, its own if it has one, else that of one that is not `used`. False: there is none."""
        if number not in self._slots:
            slot = self._free.pop() if self._free else 0
            if not slot:
                idle = next((one for one in self._slots if one not in used), None)
                if idle is None:
                    return False
                slot = self._slots.pop(idle)
            self._slots[number] = slot
            self._loads.append((slot, number))
            self.num_loads += 1
        self._slots.move_to_end(number)
        return True

    def take_loads(self) -> tuple[tuple[int, int], ...]:
        """What the next step has to put into slots: slot and number of each."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def load_again(self, loads: tuple[tuple[int, int], ...]) -> None:
        """A step with these was not executed; later ones for the same slots replace them."""
        self._loads = [(slot, number) for slot, number in loads if self._slots.get(number) == slot] + self._loads


class AdapterQueue(WaitingQueue):
    """A queue in front of another: it holds back what waits for a slot. Only open adapters' sequences count as its
    members."""

    def __init__(self, inner: WaitingQueue, book: AdapterBook) -> None:
        super().__init__()
        self._inner, self._book = inner, book
        self._held: OrderedDict[int, dict[int, Answer]] = OrderedDict()  # by adapter and uid, first come first
        self._since: dict[int, float] = {}  # by adapter: when it was first seen waiting
        self._closing: set[int] = set()
        self._waiting: Counter[int] = Counter()  # members by adapter

    def __len__(self) -> int:
        return len(self._members) + sum(map(len, self._held.values()))

    def __iter__(self) -> Iterator[Answer]:
        yield from self._members.values()
        for held in self._held.values():
            yield from held.values()

    @property
    def num_adapters(self) -> int:
        """That wait for a slot."""
        return len(self._held)

    def num_held(self, tenant: int) -> int:
        """How many of a tenant's sequences wait for a slot."""
        return sum(one.tenant == tenant for held in self._held.values() for one in held.values())

    def push(self, sequence: Answer) -> None:
        number = sequence.adapter.number
        if number < 0:
            super().push(sequence)
        elif number in self._held or number in self._closing or not self._book.is_open(number):
            self._held.setdefault(number, {})[sequence.uid] = sequence
        else:
            if not self._held:  # else those that were opened first close first, however much they are asked for
                self._book.note_use(number)
            super().push(sequence)

    def remove(self, sequence: Answer) -> None:
        if sequence.uid in self._members:
            super().remove(sequence)
            return
        held = self._held[sequence.adapter.number]
        del held[sequence.uid]
        if not held:
            self._forget(sequence.adapter.number)

    def begin_round(self, num_admissions: int) -> None:
        self._inner.begin_round(num_admissions)

    def head(self) -> Answer | None:
        return self._inner.head()

    def open_slots(self, rows: Sequence[Answer | None], now: float) -> list[Answer]:
        """Opens adapters that wait while there are slots, and closes others for the rest. rows: the sequences that have
        one. Returns those to be preempted, since an adapter has waited too long."""
        if not self._held:
            self._closing.clear()
            return []
        used = {one.adapter.number for one in rows if one is not None} | {
            one for one in self._waiting if self._waiting[one]
        }
        for number in list(self._held):
            if not self._book.open(number, used):
                break
            used.add(number)
            self._closing.discard(number)
            for sequence in self._forget(number).values():
                super().push(sequence)
        self._closing = set(self._book.opened()[: len(self._held)])
        if not self._held:
            return []
        first = next(iter(self._held))
        if now - self._since.setdefault(first, now) < PATIENCE_S:
            return []
        return self._give_way(self._book.opened()[0], rows)

    def _give_way(self, number: int, rows: Sequence[Answer | None]) -> list[Answer]:
        """All that keeps an adapter's slot in use: what has not begun is held back again, the rest is returned."""
        for sequence in [one for one in self._members.values() if one.adapter.number == number]:
            super().remove(sequence)
            self.push(sequence)
        running = [one for one in rows if one is not None and one.adapter.number == number]
        return [one for one in running if one.state is SequenceState.RUNNING]

    def _forget(self, number: int) -> dict[int, Answer]:
        self._since.pop(number, None)
        return self._held.pop(number)

    def _enter(self, sequence: Answer) -> None:
        self._waiting[sequence.adapter.number] += sequence.adapter is not NO_ADAPTER
        self._inner.push(sequence)

    def _leave(self, sequence: Answer) -> None:
        self._waiting[sequence.adapter.number] -= sequence.adapter is not NO_ADAPTER
        self._inner.remove(sequence)
