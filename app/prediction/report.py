"""A predictor's file in words, tables and curves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from app.markdown import table
from app.prediction.artifact import Artifact
from app.prediction.figures import Accuracy, Figure, ModelFigures, RoutingFigures, Validation

MOST_IMPORTANT = 12


def markdown(artifact: Artifact) -> str:
    """What a predictor is worth on prompts that were held back, before priors are mixed in."""
    if artifact.validation is None:
        return f"{artifact.prompts} prompts are too few to hold any back: its errors are not known."
    return figures(artifact.validation)


def figures(validation: Validation) -> str:
    parts = [
        f"{validation.prompts} prompts in {validation.folds} folds; mean ± deviation over folds.",
        *(_lengths(validation.models) if any(m.length for m in validation.models) else ()),
        *(_qualities(validation.models) if any(m.quality for m in validation.models) else ()),
        *(_routing(validation.routing) if validation.routing is not None else ()),
    ]
    return "\n".join(parts)


def whole(artifact: Artifact) -> str:
    trained = datetime.fromtimestamp(artifact.trained_s, UTC).isoformat(timespec="seconds")
    calibration = artifact.quality_calibration
    parts = [
        f"Trained {trained} on {artifact.prompts} prompts (data {artifact.data_sha256[:12]}), "
        f"features of version {artifact.feature_version}, tokenizer {artifact.tokenizer}.",
        "",
        *table(
            ("model", "answers with a length", "with a score"),
            (
                (card.name, str(card.length_examples), str(card.quality_examples))
                for card in artifact.cards
            ),
        ),
        "",
        markdown(artifact),
    ]
    if calibration is not None:
        parts += [
            "",
            f"Of what the quality booster says, {calibration.common:.0%} is believed of the prompt "
            f"and {calibration.own:.0%} of a model beside the others.",
        ]
    parts += _importances(artifact)
    if artifact.validation is not None:
        parts += _calibration(artifact.validation)
        parts += _slices(artifact.validation)
    return "\n".join(parts)


def draw(artifact: Artifact, path: Path) -> None:
    """Mean score against predicted score, by model. ImportError without matplotlib; ValueError
    where there is nothing to draw."""
    validation = artifact.validation
    models = [m for m in validation.models if m.quality_bins] if validation is not None else []
    if not models:
        raise ValueError("no scores were held back: there is no calibration to draw")
    from matplotlib.figure import Figure as Canvas

    axes = (canvas := Canvas(figsize=(5, 5), layout="constrained")).subplots()
    axes.plot((0, 1), (0, 1), color="grey", linewidth=0.8)
    for model in models:
        predicted = [b.predicted for b in model.quality_bins]
        axes.plot(predicted, [b.observed for b in model.quality_bins], "o-", label=model.model)
    axes.set(xlabel="predicted quality", ylabel="mean score", xlim=(0, 1), ylim=(0, 1))
    axes.legend()
    canvas.savefig(path)


def _lengths(models: Sequence[ModelFigures]) -> list[str]:
    rows = (
        (
            m.model,
            str(m.length.mae),
            str(m.length.relative_mae),
            str(m.length.rank_correlation),
            str(m.coverage),
        )
        for m in models
        if m.length is not None
    )
    head = (
        "output length",
        "MAE, tokens",
        "over MAE of the mean",
        "rank correlation",
        "within 0.1 to 0.9",
    )
    return ["", *table(head, rows)]


def _qualities(models: Sequence[ModelFigures]) -> list[str]:
    def row(model: str, quality: Accuracy) -> tuple[str, ...]:
        figures = (quality.mae, quality.relative_mae, quality.rank_correlation)
        return model, *map(str, figures)

    rows = (row(m.model, m.quality) for m in models if m.quality is not None)
    return ["", *table(("quality", "MAE", "over MAE of the mean", "rank correlation"), rows)]


def _routing(routing: RoutingFigures) -> list[str]:
    def row(name: str, figure: Figure) -> tuple[str, str]:
        return name, f"{figure.mean:.4f} ± {figure.spread:.4f}"

    return [
        "",
        *table(
            (f"best predicted quality, {routing.prompts} prompts", "mean score"),
            (
                row("routed", routing.routed),
                row("best single model", routing.best_single),
                row("routed over best single", routing.over_best_single),
                row("random", routing.random),
                row("oracle", routing.oracle),
            ),
        ),
    ]


def _importances(artifact: Artifact) -> list[str]:
    parts: list[str] = []
    for name, shares in artifact.gain_shares.items():
        ordered = sorted(shares.items(), key=lambda share: -share[1])[:MOST_IMPORTANT]
        rows = ((column, f"{share:.1%}") for column, share in ordered)
        parts += ["", *table((f"what {name} goes by", "share of the gain"), rows)]
    return parts


def _calibration(validation: Validation) -> list[str]:
    rows = (
        (m.model, f"{b.predicted:.3f}", f"{b.observed:.3f}", str(b.answers))
        for m in validation.models
        for b in m.quality_bins
    )
    lines = table(("calibration", "predicted quality", "mean score", "answers"), rows)
    return ["", *lines] if len(lines) > 2 else []


def _slices(validation: Validation) -> list[str]:
    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    rows = (
        (s.name, str(s.answers), number(s.length_mae, 0), number(s.quality_mae, 3))
        for s in validation.slices
    )
    return ["", *table(("answers to", "how many", "length MAE, tokens", "quality MAE"), rows)]
