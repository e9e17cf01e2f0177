"""``foretoken collect`` and ``foretoken judge``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from app.dataset import collection, judge
from app.dataset.answers import read_answers
from app.dataset.budget import Prices
from app.dataset.endpoint import EndpointError
from app.dataset.journal import Journal
from app.dataset.prompts import read_prompts
from app.rows import RowError, parse_object

UNUSABLE = 2
"""Exit code, as of a wrong option: a file that cannot be read or written."""
BUDGET_REACHED = 3
"""Exit code."""

app = typer.Typer(rich_markup_mode=None)


@app.command("collect")
def collect_answers(
    prompts: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSON Lines, or .parquet: prompt or messages; id, task and reference if known.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", dir_okay=False, help="JSON Lines; what it holds is not asked again."
        ),
    ],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[
        list[str] | None, typer.Option(help="Of the pool, repeatedly; default: all.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Limit on each answer.")] = None,
    concurrency: Annotated[int, typer.Option(help="Answers under way at once.")] = 8,
    timeout_s: Annotated[float, typer.Option(help="For each attempt at an answer.")] = 300.0,
) -> None:
    """Ask every model of a pool each prompt and keep the answers; failed ones are asked again."""
    try:
        settings = collection.Collection(
            url=url,
            models=tuple(model or ()),
            max_tokens=max_tokens,
            concurrency=concurrency,
            timeout_s=timeout_s,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with _refusals():
        wanted = read_prompts(prompts)
        with Journal(output) as journal:
            collected = asyncio.run(collection.collect(settings, wanted, journal))
    tally = collected.tally
    typer.echo(
        f"{tally.done} answers of {len(collected.models)} models to {len(wanted)} prompts; "
        f"{collected.already} were there"
    )
    _end(tally.failure_lines())


@app.command("judge")
def judge_answers(
    answers: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="From foretoken collect.")
    ],
    endpoint: Annotated[
        str, typer.Option(help="OpenAI-compatible, such as https://api.openai.com/v1.")
    ],
    judge_model: Annotated[str, typer.Option(help="Its name there.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", dir_okay=False, help="JSON Lines; what it holds is not judged again."
        ),
    ],
    api_key_env: Annotated[
        str, typer.Option(help="The environment variable with the key; none is sent if not set.")
    ] = "OPENAI_API_KEY",
    budget_usd: Annotated[
        float | None,
        typer.Option(
            help="For all that the output holds; makes no call that is expected to go beyond it. "
            "A call that was sent but brought no usable answer counts as what it was expected to "
            "cost; one that was refused, nothing."
        ),
    ] = None,
    price_in_usd_per_mtok: Annotated[
        float | None, typer.Option(help="Per million tokens of prompts.")
    ] = None,
    price_out_usd_per_mtok: Annotated[
        float | None, typer.Option(help="Per million tokens of what the judge writes.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Calls under way at once.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the order in which answers are shown.")] = 1,
    reasks: Annotated[int, typer.Option(help="When the judge returns no sound scores.")] = 2,
    timeout_s: Annotated[float, typer.Option(help="For each attempt at a call.")] = 120.0,
    fields: Annotated[
        str,
        typer.Option(
            help='More of each request\'s body, as a JSON object, such as {"temperature": 0}.'
        ),
    ] = "{}",
) -> None:
    """Score the answers to each prompt by a judge that is not told whose they are.

    A prompt is judged when all its answers have a score; a new answer has all of its prompt's
    judged again, and the newest scores stand. Exit code 1: some failed, and are judged by the next
    run; or the first calls were all refused alike, which ends the run. Exit code 2: a setting or a
    file cannot be used. Exit code 3: the budget is reached.
    """
    try:
        settings = judge.Judging(
            url=endpoint,
            judge_model=judge_model,
            seed=seed,
            concurrency=concurrency,
            timeout_s=timeout_s,
            reasks=reasks,
            prices=_prices(price_in_usd_per_mtok, price_out_usd_per_mtok),
            budget_usd=budget_usd,
            fields=_fields(fields),
            api_key=_api_key(api_key_env),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with _refusals():
        read = read_answers(answers)
        with Journal(output) as journal:
            judged = asyncio.run(judge.judge(settings, read, journal))
    typer.echo(
        f"{judged.tally.done} prompts judged; {judged.already} were; "
        f"{judged.unanswered} have no answer to judge"
    )
    cost = "null" if judged.cost_usd is None else f"{judged.cost_usd:.6f}"
    spent = "null" if judged.spent_usd is None else f"{judged.spent_usd:.6f}"
    typer.echo(f"cost_usd {cost}, of the whole file {spent}")
    if judged.exhausted:
        typer.echo(f"the budget of {budget_usd} USD is reached: {judged.left} prompts not judged")
    _end(judged.tally.failure_lines(), BUDGET_REACHED if judged.exhausted else 0)


def _prices(in_usd_per_mtok: float | None, out_usd_per_mtok: float | None) -> Prices | None:
    if in_usd_per_mtok is None and out_usd_per_mtok is None:
        return None
    if in_usd_per_mtok is None or out_usd_per_mtok is None:
        raise ValueError("a price of tokens in needs one of tokens out, and the reverse")
    return Prices(in_usd_per_mtok, out_usd_per_mtok)


def _fields(text: str) -> dict[str, Any]:
    try:
        return parse_object(text.encode())
    except ValueError as error:
        raise ValueError(f"fields: {error}") from error


def _api_key(variable: str) -> str | None:
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{variable} holds what cannot be a key")
    return key or None


def _end(failure_lines: list[str], code: int = 0) -> None:
    for line in failure_lines:
        typer.echo(line)
    raise typer.Exit(code or int(bool(failure_lines)))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except RowError as error:
        raise typer.BadParameter(str(error)) from error
    except EndpointError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        typer.echo(" ".join(str(error).split()), err=True)
        raise typer.Exit(UNUSABLE) from error
