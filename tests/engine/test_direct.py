"""An exchange in which some pairs read and others send: the same bits arrive, and both sides of a pair agree."""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
import torch
from torch import distributed

from nereus.core import NereusError
from nereus.engine import reading
from nereus.engine.direct import Direct
from nereus.engine.exchange import Exchange
from nereus.engine.groups import GroupRegistry
from nereus.engine.messages import Part
from nereus.engine.reading import LEAST_RUN_BYTES, MOST_PIECES
from nereus.engine.transports import attach
from nereus.engine.transports.torch import Torch

BUCKET_BYTES = LIMIT = 1 << 14
Act = Callable[[Torch], None]


def on_threads(count: int, act: Act, reads: Mapping[int, bool] | None = None) -> None:
    store = distributed.HashStore()

    def run(rank: int) -> None:
        registry = GroupRegistry(store, rank, 20, read_memory=(reads or {}).get(rank, True))
        try:
            act(Torch(registry.make("exchange#1", range(count)), 20))
        finally:
            registry.drop_all()

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


def logical(source: int, target: int) -> list[torch.Tensor]:
    """What one rank sends another: plain, columns, a transposed one, many rows, one element, none, conjugated."""
    made = torch.Generator().manual_seed(10 * source + target)
    wide = torch.randn(70, 300, generator=made)
    return [
        wide,
        torch.randn(40, 200, generator=made)[:, 100:],
        torch.randn(30, 20, generator=made, dtype=torch.float64).t(),
        torch.randn(9_000, generator=made).to(torch.bfloat16),
        torch.tensor(7 * source + target),
        torch.empty(0, 4),
        torch.randn(5, generator=made) < 0,
    ]


def exchanged(transport: Torch, send: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> set[int]:
    """All to all, and again with new contents; whom this rank read from."""
    peers = [rank for rank in range(transport.size) if rank != transport.rank]
    errors: list[NereusError] = []
    copied: list[bool] = []

    def meanwhile() -> None:
        copied.append(True)

    for shift in (0, 5):
        sends = {p: [Part(send(t), t.dtype) for t in logical(transport.rank + shift, p)] for p in peers}
        wanted = {p: logical(p + shift, transport.rank) for p in peers}
        got = {p: [torch.full_like(t, 1) for t in found] for p, found in wanted.items()}
        receives = {p: [Part(t, t.dtype) for t in found] for p, found in got.items()}
        exchange = Exchange(transport, sends, receives, LIMIT, BUCKET_BYTES, errors.append)
        exchange.run(meanwhile)
        assert errors == []
        for peer in peers:
            assert all(torch.equal(a, b) for a, b in zip(got[peer], wanted[peer], strict=True)), peer
    assert copied == [True, True]
    return set(exchange._direct.read_from)


@pytest.mark.parametrize("batch", [1, reading.BATCH_PIECES])
def test_all_pairs_of_one_host_read(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(reading, "BATCH_PIECES", batch)
    found: dict[int, set[int]] = {}
    on_threads(3, lambda transport: found.update({transport.rank: exchanged(transport)}))
    assert found == {rank: {0, 1, 2} - {rank} for rank in range(3)}


def test_pairs_that_read_and_pairs_that_send_go_together() -> None:
    found: dict[int, set[int]] = {}
    on_threads(3, lambda transport: found.update({transport.rank: exchanged(transport)}), {2: False})
    assert found == {0: {1}, 1: {0}, 2: set()}


@pytest.mark.parametrize(("refuses", "opens"), [({}, True), ({2: False}, True), ({2: False}, False), ({}, False)])
def test_who_has_met_its_peers_has_staging_memory_for_what_is_sent_alone(
    refuses: Mapping[int, bool], opens: bool
) -> None:
    """Twice with one exchange: rank 0 sends columns to both others, which takes staging memory unless it is read."""
    columns = torch.arange(64 * 512.0).view(64, 512)[:, 256:]
    staged: dict[int, set[int]] = {rank: set() for rank in range(3)}

    def act(transport: Torch) -> None:
        room = torch.zeros(64, 512)[:, 256:]
        part = Part(room if transport.rank else columns, torch.float32)
        sides = ({}, {0: [part]}) if transport.rank else ({1: [part], 2: [part]}, {})
        exchange = Exchange(transport, *sides, 1 << 20, 1 << 20, _raise)
        for _ in range(2):
            room.zero_()
            if opens:
                exchange.open()
            staged[transport.rank].add(sum(buffer.numel() for buffer in exchange.allocate()))
            exchange.run(lambda: None)
            assert torch.equal(room if transport.rank else columns, columns)

    on_threads(3, act, refuses)
    reads = {rank for rank in (1, 2) if opens and refuses.get(rank, True)}
    expected = {0: 2 - len(reads), 1: int(1 not in reads), 2: int(2 not in reads)}
    assert staged == {rank: {copies * columns.numel() * 4} for rank, copies in expected.items()}


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, None])
def test_where_the_kernel_refuses_or_reads_less_everything_is_sent(
    monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    real = attach._vm_readv()

    def call(*arguments: int) -> int:
        if number is None:
            return real(*arguments) - 1
        ctypes.set_errno(number)
        return -1

    found: dict[int, set[int]] = {}
    monkeypatch.setattr(attach, "_vm_readv", lambda: call)
    on_threads(2, lambda transport: found.update({transport.rank: exchanged(transport)}))
    assert found == {0: set(), 1: set()}


def test_a_source_that_converts_sends_and_a_target_that_converts_reads() -> None:
    found: dict[int, frozenset[int]] = {}

    def act(transport: Torch) -> None:
        me, peer = transport.rank, 1 - transport.rank
        full = torch.randn(100, 50, generator=torch.Generator().manual_seed(peer))
        mine = torch.randn(100, 50, generator=torch.Generator().manual_seed(me))
        travels = {0: torch.bfloat16, 1: torch.float32}  # rank 0 stores float32, and rank 1 wants float64
        got = torch.zeros(100, 50, dtype=torch.bfloat16 if me == 1 else torch.float64)
        exchange = Exchange(
            transport,
            {peer: [Part(mine, travels[me])]},
            {peer: [Part(got, travels[peer])]},
            LIMIT,
            BUCKET_BYTES,
            _raise,
        )
        exchange.run(lambda: None)
        assert torch.equal(got, full.to(travels[peer]).to(got.dtype))
        found[me] = exchange._direct.read_from

    on_threads(2, act)
    assert found == {0: frozenset({1}), 1: frozenset()}


@pytest.mark.parametrize("travels", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_a_target_that_knows_what_is_stored_reads_and_converts_it(travels: torch.dtype, wanted: torch.dtype) -> None:
    """By way of what travels, in pieces of the scratch buffer, of rows, columns, transposed and repeated views."""
    wide = torch.randn(300, 400, generator=torch.Generator().manual_seed(1))
    views = [
        wide,
        wide[:, 100:],
        wide[:40, :30].t(),
        wide[:40, :1].expand(40, 50),
        wide[0, 0],
        wide[3, :0],
        wide.view(20, 15, 400),
    ]
    reads: dict[int, frozenset[int]] = {}

    def act(transport: Torch) -> None:
        got = [torch.zeros(view.shape, dtype=wanted) for view in views]
        parts = [Part(view, travels, torch.float32) for view in (got if transport.rank else views)]
        sides = ({}, {0: parts}) if transport.rank else ({1: parts}, {})
        exchange = Exchange(transport, *sides, LIMIT, BUCKET_BYTES, _raise)
        exchange.run(lambda: None)
        assert exchange._direct.scratch_bytes <= BUCKET_BYTES
        reads[transport.rank] = exchange._direct.read_from
        if transport.rank:
            assert all(torch.equal(a, b.to(travels).to(wanted)) for a, b in zip(got, views, strict=True))

    on_threads(2, act)
    assert reads == {0: frozenset(), 1: frozenset({0})}


def test_tiny_pieces_and_conjugates_are_sent_and_tiny_targets_go_by_the_scratch_buffer() -> None:
    width = LEAST_RUN_BYTES // 8
    plain = torch.arange(200.0 * width).view(200, width)
    assert plain.numel() > MOST_PIECES
    rooms = {"tiny target": torch.zeros(200, 2 * width)[:, ::2], "plain": torch.zeros(200, width)}
    tiny = torch.stack([plain, plain], dim=-1)[..., 0]
    turned = torch.complex(plain, plain).conj()
    reads: dict[str, bool] = {}

    def sent(name: str, view: torch.Tensor, room: torch.Tensor) -> Act:
        def act(transport: Torch) -> None:
            out, inward = {1: [Part(view, view.dtype)]}, {0: [Part(room, room.dtype)]}
            exchange = Exchange(
                transport, *((out, {}) if transport.rank == 0 else ({}, inward)), LIMIT, BUCKET_BYTES, _raise
            )
            exchange.run(lambda: None)
            if transport.rank == 1:
                assert torch.equal(room, view)
                reads[name] = exchange._direct.read_from == {0}
                assert exchange._direct.scratch_bytes <= LIMIT

        return act

    for name, room in rooms.items():
        on_threads(2, sent(name, plain, room))
    on_threads(2, sent("tiny source", tiny, torch.zeros(200, width)))
    on_threads(2, sent("conjugate", turned, torch.zeros(200, width, dtype=turned.dtype)))
    assert reads == {"tiny target": True, "plain": True, "tiny source": False, "conjugate": False}


def test_a_pair_whose_parts_are_all_empty_has_nothing_to_say() -> None:
    def act(transport: Torch) -> None:
        part = [Part(torch.zeros(0, 3), torch.float32)]
        sides = ({1: part}, {}) if transport.rank == 0 else ({}, {0: part})
        Exchange(transport, *sides, LIMIT, BUCKET_BYTES, _raise).run(lambda: None)
        assert not transport.group.neighbours.readers

    on_threads(2, act)


def test_a_source_that_ends_between_its_offer_and_the_reading_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: dict[int, list[str]] = {0: [], 1: []}
    real = Direct.pull

    def gone(self: Direct, rank: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(attach, "_vm_readv", lambda: _ended)
            real(self, rank)

    def act(transport: Torch) -> None:
        part = [Part(torch.zeros(10), torch.float32)]
        sides = ({1: part}, {}) if transport.rank == 0 else ({}, {0: part})
        note = errors[transport.rank].append
        Exchange(transport, *sides, LIMIT, BUCKET_BYTES, lambda error: note(str(error))).run(lambda: None)

    monkeypatch.setattr(Direct, "pull", gone)
    on_threads(2, act)
    assert errors[0] == []
    assert len(errors[1]) == 1
    assert "reading from rank 0 failed: memory of process" in errors[1][0]
    assert "has ended" in errors[1][0]


@pytest.mark.parametrize("kept", [False, True])
def test_a_source_waits_for_those_who_read_it_unless_it_is_kept_anyhow(kept: bool) -> None:
    """The target begins to read once the source has ended, or after a while in which it should not end."""
    ended = threading.Event()
    content, room = torch.arange(1000.0), torch.zeros(1000)
    early: list[bool] = []

    def act(transport: Torch) -> None:
        sides = ({}, {0: [Part(room, room.dtype)]}) if transport.rank else ({1: [Part(content, content.dtype)]}, {})
        exchange = Exchange(transport, *sides, LIMIT, BUCKET_BYTES, _raise, kept)
        if transport.rank:
            exchange.run(lambda: early.append(ended.wait(20 if kept else 0.2)))
        else:
            exchange.run(lambda: None)
            ended.set()

    on_threads(2, act)
    assert early == [kept]
    assert torch.equal(room, content)


def test_a_target_that_does_not_say_that_it_has_read_is_an_error_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []
    over = threading.Event()

    def act(transport: Torch) -> None:
        part = [Part(torch.zeros(10), torch.float32)]
        if transport.rank:
            exchange = Exchange(transport, {}, {0: part}, LIMIT, BUCKET_BYTES, _raise)
            monkeypatch.setattr(exchange._direct, "tell", over.wait)
            exchange.run(lambda: None)
        else:
            brief = Torch(transport.group, 0.5)
            Exchange(brief, {1: part}, {}, LIMIT, BUCKET_BYTES, lambda error: errors.append(str(error))).run(_nothing)
            over.set()

    on_threads(2, act)
    assert len(errors) == 1
    assert "hearing from rank 1 that it has read failed (deadline of 0.5 s)" in errors[0]


def test_ranks_that_have_met_do_not_meet_again() -> None:
    def act(transport: Torch) -> None:
        neighbours, errors = transport.group.neighbours, list[NereusError]()
        peers = [rank for rank in range(3) if rank != transport.rank]
        neighbours.meet(transport, peers[:1], [p for p in range(3) if (p, transport.rank) in FIRST], errors.append)
        known = dict(neighbours.sources)
        neighbours.meet(transport, peers, peers, errors.append)
        assert errors == []
        assert all(neighbours.sources[rank] is process for rank, process in known.items())
        assert set(neighbours.readers) == set(neighbours.sources) == set(peers)
        assert all(neighbours.readers.values())

    on_threads(3, act)


FIRST = {(me, min(other for other in range(3) if other != me)) for me, _ in permutations(range(3), 2)}


def _raise(error: NereusError) -> None:
    raise error


def _nothing() -> None:
    """Nothing to do meanwhile."""


def _ended(*_: int) -> int:
    ctypes.set_errno(errno.ESRCH)
    return -1


def test_a_peer_that_does_not_come_is_an_error_of_the_probe() -> None:
    store = distributed.HashStore()

    def run(rank: int) -> list[str]:
        registry = GroupRegistry(store, rank, 20)
        transport = Torch(registry.make("exchange#1", (0, 1)), 0.3)
        errors: list[str] = []
        if rank == 0:
            registry.get("exchange#1").neighbours.meet(transport, [1], [], lambda error: errors.append(str(error)))
        registry.drop_all()
        return errors

    with ThreadPoolExecutor(2) as pool:
        heard, _ = pool.map(run, (0, 1))
    assert any("rank 1" in text for text in heard)
