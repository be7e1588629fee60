"""What budgets need to know beforehand, and how they hold for rollouts as a whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reflact.calls import CallReservation
from reflact.config import BudgetConfig, TrainerConfig
from reflact.errors import ConfigError
from reflact.llm.budget import Budget
from reflact.llm.cache_keys import address_of
from reflact.llm.pricing import cap_of, usd_of
from reflact.ports import Environment, ResponseStore, Session
from reflact.results import Usage
from reflact.roles import ModelConfig
from reflact.types import Grade, Item, Split


def require_caps(config: TrainerConfig, *, passed: Collection[str]) -> None:
    """Make sure that the worst case of every call is known where a budget has to reservation.

    Args:
        config: The configuration of a run.
        passed: The roles that are passed in Python, so that their calls are not seen.

    Raises:
        ConfigError: Names the key that is missing.
    """
    limits, target = config.budget, config.target
    by_tokens, by_calls = _set(limits, "max_tokens", "max_usd"), _set(limits, "max_calls")
    if "optimizer" in passed and (by_tokens or by_calls):
        raise ConfigError(
            f"budget.{(by_tokens + by_calls)[0]} cannot hold for an optimizer passed in Python, whose calls "
            "are not seen: configure models.optimizer instead, or set it to null"
        )
    if "target" in passed:
        for keys, name, cap in (
            (by_tokens, "max_tokens_per_rollout", target.max_tokens_per_rollout),
            (by_calls, "max_calls_per_rollout", target.max_calls_per_rollout),
        ):
            if keys and cap is None:
                raise ConfigError(
                    f"budget.{keys[0]} needs target.{name}: the calls of a target passed in Python are not "
                    "seen, so say the most that one rollout takes"
                )
    if config.environment.grader == "critic" and "target" in passed and (by_tokens or by_calls):
        raise ConfigError(
            f"budget.{(by_tokens + by_calls)[0]} cannot hold where a critic grades a target passed in "
            "Python: the critic's calls are seen within rollouts whose others are not; configure "
            "models.target instead, or set it to null"
        )
    for role in ("target", "optimizer", *(["critic"] if config.uses_critic else [])):
        require_cap(limits, getattr(config.models, role), role=role, seen=role not in passed)


def require_cap(limits: BudgetConfig, model: ModelConfig, *, role: str, seen: bool = True) -> None:
    """Make sure that the worst case of a role's calls is known where a budget has to reservation.

    Args:
        limits: The budget.
        model: The role's model.
        role: Its name under ``models``.
        seen: Whether its calls go through the own client.

    Raises:
        ConfigError: Names the key that is missing.
    """
    by_tokens = _set(limits, "max_tokens", "max_usd")
    if by_tokens and seen and cap_of(_settings(model)) is None:
        raise ConfigError(f"budget.{by_tokens[0]} needs models.{role}.max_tokens: a cap on each reply")
    if limits.max_usd is not None and not model.unpriced and usd_of(Usage(calls=1), model) is None:
        raise ConfigError(
            f"budget.max_usd needs models.{role}.price: no list price is known of {model.model!r} at "
            f"{address_of(model.base_url)}; give one, or set models.{role}.unpriced to true, so that its "
            "calls cost nothing"
        )


def _set(limits: BudgetConfig, *keys: str) -> list[str]:
    return [key for key in keys if getattr(limits, key) is not None]


def _settings(model: ModelConfig) -> dict[str, object]:
    return {model.max_tokens_key: model.max_tokens, **model.extra_body}


class SeenRollouts:
    """An environment that gives no result once the budget is spent, whatever it made of the error.

    Args:
        inner: The environment.
        budget: What the run may still take.
    """

    def __init__(self, inner: Environment, *, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget

    @property
    def identity(self) -> str:
        """That of the environment."""
        return self._inner.identity

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items, in a fixed order."""
        return self._inner.items(split)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Run and judge an item.

        Raises:
            BudgetSpent: A call was refused meanwhile, of this rollout or of another one.
        """
        graded = await self._inner.run(item, session, seed=seed)
        self._budget.check()
        return graded


class UnseenRollouts(SeenRollouts):
    """An environment whose target makes calls that are not seen: each rollout counts as what was declared.

    Args:
        inner: The environment.
        budget: What the run may still take.
        effects: The ledger.
        run_id: The run that pays.
        worst: The most that a rollout takes.
    """

    def __init__(
        self, inner: Environment, *, budget: Budget, effects: ResponseStore, run_id: str, worst: Usage
    ) -> None:
        super().__init__(inner, budget=budget)
        self._effects = effects
        self._run_id = run_id
        self._worst = worst

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Run and judge an item once its rollout fits the budget.

        Raises:
            BudgetSpent: It does not fit.
        """
        place = f"target/rollout/unseen/{item.fingerprint}/{seed}"
        intent = CallReservation(
            key=place,
            run_id=self._run_id,
            call_id=place,
            role="target",
            purpose="rollout",
            endpoint="unseen",
            model="unseen",
            worst_case=self._worst,
        )
        async with self._budget.reserve(self._worst) as reservation:
            reservation.mark_sent()
            await self._effects.reserve(intent)
            graded = await self._inner.run(item, session, seed=seed)
            calls = self._worst.calls
            await self._effects.settle(intent, Usage(calls=calls, uncounted=calls))
            return graded


def declared(config: TrainerConfig) -> Usage | None:
    """Return the most that a rollout takes whose calls are not seen, None where nothing is declared.

    Its tokens are taken as the dearest kind.
    """
    target, model = config.target, config.models.target
    if target.max_calls_per_rollout is None and target.max_tokens_per_rollout is None:
        return None
    tokens = target.max_tokens_per_rollout or 0
    kinds = (
        Usage(input_tokens=tokens),
        Usage(input_tokens=tokens, cached_tokens=tokens),
        Usage(output_tokens=tokens),
    )
    prices = [price for price in (usd_of(kind, model) for kind in kinds) if price is not None]
    return Usage(calls=target.max_calls_per_rollout or 1, input_tokens=tokens, usd=max(prices, default=None))
