"""State schemas made by hand, with every way a tensor can be cut."""

from __future__ import annotations

from nereus.core import EMU, Assignment, Candidate, Cut, Kind, Layout, ModelStage, Plan, StateSchema, TensorSpec, Where

TRAINED = {Kind.PARAM: "bf16", Kind.MASTER: "fp32", Kind.EXP_AVG: "fp32", Kind.EXP_AVG_SQ: "fp32"}
FROZEN = {Kind.PARAM: "fp32"}

ACTOR = ModelStage.parse("actor/training")
CRITIC = ModelStage.parse("critic/training")
ROLLOUT = ModelStage.parse("actor/generation")
REWARD = ModelStage.parse("reward/inference")


def decoder(
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 2,
    ffn: int = 24,
    vocab: int = 17,
    tied: bool = False,
    scalar: bool = False,
    dtypes: dict[Kind, str] | None = None,
) -> StateSchema:
    """A decoder: padded vocabulary, q/k/v/o by heads, gate/up/down by columns and rows, norms, head."""
    hidden = heads * head_dim
    padded, ffn_cut = Cut(0, vocab, padded=True), Cut(0, ffn)
    q_cut, kv_cut = Cut(0, heads), Cut(0, kv_heads, replicated=True)
    tensors = [TensorSpec("embed", (vocab, hidden), Where.BOTH_ENDS if tied else Where.FIRST, None, padded)]
    for layer in range(layers):
        parts = {
            "q": ((hidden, hidden), q_cut),
            "q_bias": ((hidden,), q_cut),
            "k": ((kv_heads * head_dim, hidden), kv_cut),
            "v": ((kv_heads * head_dim, hidden), kv_cut),
            "o": ((hidden, hidden), Cut(1, heads)),
            "gate": ((ffn, hidden), ffn_cut),
            "up": ((ffn, hidden), ffn_cut),
            "down": ((hidden, ffn), Cut(1, ffn)),
            "norm_1": ((hidden,), Cut()),
            "norm_2": ((hidden,), Cut()),
        }
        for name, (shape, cut) in parts.items():
            tensors.append(TensorSpec(f"layers.{layer}.{name}", shape, Where.LAYER, layer, cut))
    tensors.append(TensorSpec("norm", (hidden,), Where.LAST))
    if scalar:
        tensors.append(TensorSpec("score", (1, hidden), Where.LAST))
    elif not tied:
        tensors.append(TensorSpec("head", (vocab, hidden), Where.LAST, None, padded))
    return StateSchema(layers, tuple(tensors), TRAINED if dtypes is None else dtypes)


def even(layers: int = 8, rows: int = 64, columns: int = 8, kinds: dict[Kind, str] | None = None) -> StateSchema:
    """Layers that every power of two cuts evenly and nothing else, as in the paper's arithmetic."""
    tensors = tuple(TensorSpec(f"layers.{i}.w", (rows, columns), Where.LAYER, i, Cut(0, rows)) for i in range(layers))
    return StateSchema(layers, tensors, FROZEN if kinds is None else kinds)


def full_bytes(schema: StateSchema) -> int:
    """Bytes of one full copy of the logical state: S."""
    return schema.element_bytes * sum(tensor.elements for tensor in schema.tensors)


def units(ms: ModelStage, layout: Layout, *devices: int) -> tuple[EMU, ...]:
    """Units of one layout that fill `devices` in order."""
    size = layout.size
    return tuple(EMU(ms, layout, devices[i : i + size]) for i in range(0, len(devices), size))


def assign(ms: ModelStage, layout: Layout, *devices: int) -> Assignment:
    """The same for a plan."""
    placed = tuple(unit.devices for unit in units(ms, layout, *devices))
    return Assignment(Candidate(ms, layout, len(placed)), placed)


def plan(*assignments: Assignment) -> Plan:
    """A plan of assignments."""
    return Plan(assignments)
