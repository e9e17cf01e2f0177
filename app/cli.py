"""``foretoken``: load a server, and see how its forecasts did."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from app.evaluation import accuracy, live
from app.records import DecisionRecord, read_records

RECORDS_WAIT_S = 20.0
"""The server writes its newest records seconds after it made them."""

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.command()
def load(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(help="Mean arrivals per second.")] = 4.0,
    requests: Annotated[int, typer.Option(help="How many to send.")] = 300,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 1,
    model: Annotated[str, typer.Option(help="A model of the pool, or auto.")] = "auto",
    prompt_words: Annotated[
        int, typer.Option(help="Median length of the prompts; the longest have 10 times as many.")
    ] = live.PROMPT_WORDS_MEDIAN,
    max_tokens: Annotated[int | None, typer.Option(help="Limit on each answer.")] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="The server's records; shows the accuracy over this run's requests."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON with every request's outcome.")
    ] = None,
) -> None:
    """Send Poisson arrivals of synthetic prompts and stream the answers."""
    try:
        settings = live.Load(
            url=url,
            rate_qps=rate,
            requests=requests,
            seed=seed,
            model=model,
            prompt_words=prompt_words,
            max_tokens=max_tokens,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    results = asyncio.run(live.run(settings))
    if output is not None:
        output.write_text(json.dumps(results.to_json(), indent=1, allow_nan=False) + "\n")
    typer.echo(_summary(results))
    if records is not None:
        typer.echo()
        _show_accuracy(_records_of(results.decision_ids, records))
    if results.failures:
        raise typer.Exit(1)


@app.command("accuracy")
def show_accuracy(
    records: Annotated[
        Path, typer.Argument(exists=True, help="Where the server keeps its Parquet records.")
    ],
) -> None:
    """Predicted against observed time to the first token, as a Markdown table."""
    _show_accuracy(read_records(records))


def _summary(results: live.Results) -> str:
    answered = len(results.ttfts_s)
    lines = [f"{answered} of {results.load.requests} answered in {results.elapsed_s:.1f} s"]
    if answered:
        p50_ms, p95_ms = np.percentile(results.ttfts_s, [50, 95]) * 1e3
        lines.append(f"time to the first token, p50 {p50_ms:.1f} ms, p95 {p95_ms:.1f} ms")
    for kind, count in results.failures.most_common():
        example = next(o.failure_detail for o in results.outcomes if o.failure == kind)
        lines.append(f"{count} failed: {kind}, as in: {example}")
    return "\n".join(lines)


def _records_of(decision_ids: frozenset[str], folder: Path) -> list[DecisionRecord]:
    give_up_s = time.monotonic() + RECORDS_WAIT_S
    while True:
        found = [r for r in read_records(folder) if r.decision.decision_id in decision_ids]
        missing = decision_ids - {r.decision.decision_id for r in found}
        if not missing:
            return found
        if time.monotonic() > give_up_s:
            typer.echo(f"{len(missing)} of {len(decision_ids)} requests have no record in {folder}")
            return found
        time.sleep(1.0)


def _show_accuracy(records: list[DecisionRecord]) -> None:
    compared = accuracy.pairs(records)
    if not compared:
        typer.echo("no record of a first token to compare a forecast with", err=True)
        raise typer.Exit(1)
    typer.echo(accuracy.markdown(accuracy.by_model(compared)))
    if unanswered := sum(record.ttft_s is None for record in records):
        typer.echo(f"\nleft out: {unanswered} requests without a first token")
