"""The calls that RL algorithms are made of, and what each computes. Call names become metrics (`timing_s/NAME`)."""

from __future__ import annotations

from nereus.core import Call, ModelStage, Stage, Work

ACTOR_GENERATION = ModelStage("actor", Stage.GENERATION)
ACTOR_TRAINING = ModelStage("actor", Stage.TRAINING)
CRITIC_TRAINING = ModelStage("critic", Stage.TRAINING)
REFERENCE_INFERENCE = ModelStage("reference", Stage.INFERENCE)
REWARD_INFERENCE = ModelStage("reward", Stage.INFERENCE)

SEQUENCES = ("prompts", "responses")
GREEDY_SEQUENCES = ("prompts", "greedy_responses")

GENERATE = Call("generate", ACTOR_GENERATION, Work.GENERATE, ("prompts",), ("responses",))
GENERATE_GREEDY = Call("generate_greedy", ACTOR_GENERATION, Work.GENERATE, ("prompts",), ("greedy_responses",))
REFERENCE_LOG_PROBS = Call(
    "reference_log_probs", REFERENCE_INFERENCE, Work.FORWARD, SEQUENCES, ("reference_log_probs",)
)
REWARD_SCORES = Call("reward_scores", REWARD_INFERENCE, Work.FORWARD, SEQUENCES, ("reward_scores",))
GREEDY_REWARD_SCORES = Call(
    "greedy_reward_scores", REWARD_INFERENCE, Work.FORWARD, GREEDY_SEQUENCES, ("greedy_reward_scores",)
)
OLD_LOG_PROBS = Call("old_log_probs", ACTOR_TRAINING, Work.FORWARD, SEQUENCES, ("old_log_probs",))
VALUES = Call("values", CRITIC_TRAINING, Work.FORWARD, SEQUENCES, ("values",))

UPDATE_ACTOR = "update_actor"
UPDATE_CRITIC = "update_critic"

OUTPUTS = {
    "generate": (),
    "generate_greedy": (),
    "reference_log_probs": ("log_probs",),
    "reward_scores": ("scores",),
    "greedy_reward_scores": ("scores",),
    "old_log_probs": ("log_probs",),
    "values": ("values",),
    UPDATE_ACTOR: ("log_probs", "entropy"),
    UPDATE_CRITIC: ("values",),
}


def with_update(calls: tuple[Call, ...], name: str, model_stage: ModelStage) -> tuple[Call, ...]:
    """`calls` and an update that reads everything they write, since its advantages are made from all of it."""
    written = tuple(column for call in calls for column in call.writes)
    return (*calls, Call(name, model_stage, Work.UPDATE, ("prompts", *written)))
