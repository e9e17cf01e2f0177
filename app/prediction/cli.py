"""``foretoken train`` and ``foretoken inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.config import PoolSettings, SettingsError, load_pool
from app.dataset.answers import read_answers
from app.dataset.scores import read_scores
from app.prediction import artifact as artifacts
from app.prediction import report
from app.prediction.artifact import ArtifactError
from app.prediction.examples import (
    Example,
    examples_of,
    examples_of_records,
    without_repeats,
)
from app.prediction.learned import ModelCard
from app.records import read_records
from app.rows import RowError
from app.tokenizer import Tokenizers, TokenizerUnavailable

app = typer.Typer(rich_markup_mode=None)


@app.command("train")
def train_predictor(
    answers: Annotated[
        Path | None, typer.Argument(exists=True, help="What `foretoken collect` wrote.")
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(exists=True, help="What `foretoken judge` wrote.")
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(exists=True, help="Records of a running pool: lengths are learnt of them."),
    ] = None,
    pool: Annotated[
        Path, typer.Option(exists=True, help="Settings: the models and their tokenizer.")
    ] = Path("configs/pools/emulated.yaml"),
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The predictor's file: router.predictor.")
    ] = Path("predictor.json"),
) -> None:
    """Fit predictors of quality and output length, and show what they are worth."""
    if answers is None and from_log is None:
        raise typer.BadParameter("nothing to learn from: give ANSWERS, --from-log or both")
    if scores is not None and answers is None:
        raise typer.BadParameter("--scores are of ANSWERS: give both")
    try:
        # LightGBM: a second that no other command need wait, and libgomp.
        from app.prediction.training import train

        settings = load_pool(pool)
        examples = _examples(settings, answers, scores, from_log)
        artifact = train(examples, cards(settings), settings.tokenizers[settings.feature_tokenizer])
        artifacts.save(artifact, output)
    except (SettingsError, RowError, ValueError, OSError, TokenizerUnavailable) as error:
        typer.echo(f"not trained: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(report.markdown(artifact))
    typer.echo(f"\n{output}: trained on {artifact.prompts} prompts, {artifact.data_sha256[:12]}")


@app.command("inspect")
def inspect_predictor(
    predictor: Annotated[Path, typer.Argument(exists=True, help="What `foretoken train` wrote.")],
    plot: Annotated[
        Path | None, typer.Option(help="Where to draw calibration curves, as SVG or PNG.")
    ] = None,
) -> None:
    """Show a predictor: its data, its errors by model, task and length, and what it looks at."""
    try:
        artifact = artifacts.load(predictor)
        artifact.learned()  # what a pool would refuse is not shown as if it were sound
        text = report.whole(artifact)
        if plot is not None:
            report.draw(artifact, plot)
    except ImportError as error:
        typer.echo(text)
        typer.echo("not drawn: --plot needs matplotlib (pip install '.[plot]')", err=True)
        raise typer.Exit(1) from error
    except (ValueError, OSError) as error:
        named = isinstance(error, ArtifactError)
        typer.echo(str(error) if named else f"{predictor}: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(text)


def cards(settings: PoolSettings) -> list[ModelCard]:
    return [
        ModelCard(model.name, model.parameters_billions, model.context_tokens)
        for model in settings.models
    ]


def _examples(
    settings: PoolSettings, answers: Path | None, scores: Path | None, from_log: Path | None
) -> list[Example]:
    examples: list[Example] = []
    if answers is not None:
        tokenizer = Tokenizers(settings.tokenizers)[settings.feature_tokenizer]
        asked = read_answers(answers)
        judged = [] if scores is None else read_scores(scores, asked)
        if scores is not None and not judged:
            raise ValueError(f"{scores}: no scores; without --scores, lengths alone are learnt")
        worth = {score.key: score.score for score in judged}
        examples += _of_pool(settings, examples_of(asked, worth, tokenizer), answers)
    if from_log is not None:
        records = read_records(from_log)
        try:
            logged = examples_of_records(records)
        except ValueError as error:
            raise ValueError(f"{from_log}: {error}") from error
        examples += _of_pool(settings, logged, from_log)
    if not examples:
        given = ", ".join(str(path) for path in (answers, from_log) if path is not None)
        raise ValueError(f"{given}: no answer to learn from")
    return without_repeats(examples)


def _of_pool(settings: PoolSettings, examples: list[Example], path: Path) -> list[Example]:
    """ValueError, which names the file, for answers of a model that the pool does not have."""
    known = {model.name for model in settings.models}
    if unknown := {example.model for example in examples} - known:
        raise ValueError(
            f"{path}: answers of {', '.join(sorted(unknown))}; the pool has "
            f"{', '.join(model.name for model in settings.models)}"
        )
    return examples
