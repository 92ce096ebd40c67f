"""The page of a grid: its sections, and the tables in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from normjax.reporting import (
    diagnostics_page,
    explanations,
    findings,
    palette,
    prediction_words,
    statistics,
    tables,
    trends,
    wording,
)
from normjax.reporting.diagnostics_data import Diagnostics
from normjax.reporting.drawing import Figure
from normjax.reporting.html import (
    RUN,
    Page,
    Section,
    definitions,
    details,
    figure_sections,
    muted,
    picture,
    pretty,
    prose,
    reading,
    record,
)
from normjax.reporting.palette import Look
from normjax.reporting.prediction import Judged
from normjax.reporting.results import PlannedArm, Results, RunResult, Variant
from normjax.reporting.tables import Table, dotted, interval, number, stacked, tag, view
from normjax.reporting.wording import DETAIL, MAIN, WARNING, Finding, runs_text

Looks = Mapping[str, Look]


def render(
    results: Results, figures: Sequence[tuple[Figure, str]], looks: Looks,
    judged: Judged | None = None, diagnostics: Diagnostics | None = None,
) -> str:  # fmt: skip
    """Return the page as one self-contained HTML text.

    Args:
        results: a workdir read back.
        figures: each figure with its SVG text.
        looks: colour and marker by series.
        judged: a prediction and its score, where there is one.
        diagnostics: what the runs measured inside, where that is known.

    Returns:
        HTML without scripts or external resources. All text from files is escaped.
    """
    pictures = {figure.name: picture(figure, svg) for figure, svg in figures}
    said = [*findings.warnings(results), *trends.answer(results)]
    if (
        diagnostics is not None
        and diagnostics.self_test is not None
        and not diagnostics.self_test.sound
    ):
        said.insert(0, Finding(WARNING, str(diagnostics.self_test)))
    texts = {kind: [f.text for f in said if f.kind == kind] for kind in wording.KINDS}
    inside = (
        []
        if diagnostics is None
        else diagnostics_page.sections(results, diagnostics, pictures, looks)
    )
    predicted = prediction_words.section(judged, results, looks, pictures.pop("prediction", None))
    decoder = _decoder(results, looks, pictures.pop("decoder", None))
    more = diagnostics_page.definitions_and_bands() if inside else []
    plan, expected = results.plan, results.plan.get("hypothesis")
    return Page(
        str(plan.get("title") or "Report"), str(plan.get("question") or ""),
        lead=[muted("Expected beforehand: {}", expected)] if expected else [],
        warnings=texts[WARNING], answer=texts[MAIN], details=texts[DETAIL],
        sections=[
            _ranking(results, looks), *_rates(results, looks), *predicted,
            *figure_sections(pictures.values()), *inside, decoder,
        ],
        reading=_reading(results, more), record=_record(results, looks),
    ).render()  # fmt: skip


# --- the ranking ----------------------------------------------------------------------------------


def _ranking(results: Results, looks: Looks) -> Section:
    gaps = {v.label: results.gaps(v) for v in results.variants}
    shown = [v for v in results.variants if gaps[v.label]]
    seeds = [gap for v in shown for gap in gaps[v.label].values()]
    window = statistics.window([0.0, *seeds], [v.difference for v in shown]) if shown else None
    base, x, plan = results.baseline, results.x, results.plan

    def heading(v: Variant) -> str:
        at = f"{x['name']} {v.arm.x:g}" if x and v.arm.x is not None else ""
        return ", ".join(filter(None, (v.arm.condition, at)))

    def name(v: Variant) -> Markup:
        label = v.label
        if x is not None and v.arm.x is not None:  # the heading of its rows says that
            label = label.replace(f", {x['name']} {v.arm.x:g}", "", 1)
        if v.arm.condition:
            label = label.replace(f", {v.arm.condition}", "", 1)
        title = v.arm.title if v.arm.title != label and not x else ""
        rate = f"rate {v.rates.learning_rate:g}" if v.rates and plan.get("tuning") else ""
        return stacked(dotted(looks[v.arm.series].colour, label), title, rate)

    def difference(v: Variant) -> Any:
        return "baseline" if v.arm.series == base else interval(v.difference, signed=True)

    def plot(v: Variant) -> Markup:
        paint = palette.variable(looks[v.arm.series].colour)
        return _interval_plot(v, gaps[v.label], window, paint)

    def perplexity(v: Variant) -> Any:
        if v.loss.mean is None:
            return None
        bits = number(statistics.bits(v.loss.mean))
        return stacked(f"{statistics.perplexity(v.loss.mean):.2f}", bits)

    table = Table([
        view("Rank", lambda v: v.rank, "n"),
        view("Variant", name, "name"),
        view("Loss", lambda v: interval(v.loss), "n"),
        view(f"Difference to {base}", difference, "n"),
        view("", plot),
        view(stacked("Perplexity", "bits"), perplexity, "n"),
        view("Runs finished", lambda v: stacked(*runs_text(v).split(", "))),
        view("Parameters", lambda v: _thousands(v.arm.parameters), "n"),
    ], group=heading)  # fmt: skip
    lead = muted(
        "Test loss at the last step in nats per {unit}, lower is better. Intervals are 95 %"
        " t-intervals over seeds and text; differences to {base} are paired by both. The picture"
        " shows the difference: line at 0, mean, interval, and one ring per seed. Bits are per"
        " {unit}.",
        unit=results.unit, base=base,
    )  # fmt: skip
    files = muted(
        '{references} All numbers: <a href="summary.csv">summary.csv</a> (one row per variant),'
        ' <a href="results.csv">results.csv</a> (one row per run and evaluation).',
        references=wording.references(results),
    )
    return Section("ranking", "Ranking", [lead, table(results.ranked()), files])


def _rates(results: Results, looks: Looks) -> list[Section]:
    """Return how the rate of each variant was chosen, and what that cost beside the runs."""
    tuning = results.plan.get("tuning")
    if not tuning:
        return []
    rates, last = sorted(tuning["rates"]), {}
    for name, own in tuning["chosen"].items():
        for rate, rung, loss in own["tried"]:
            last[name, rate] = (rung, loss)

    def cell(arm: PlannedArm, rate: float) -> Any:
        if (arm.name, rate) not in last:
            return None
        rung, loss = last[arm.name, rate]
        shown = "diverged" if loss is None else number(loss)
        note = f"step {rung}" if rung != tuning["rungs"][-1] else ""
        best = tuning["chosen"][arm.name]["rate"] == rate
        return stacked(tag("b", shown) if best else shown, note)

    table = Table([
        view("Variant", lambda arm: dotted(looks[arm.series].colour, arm.series), "name"),
        *(view(f"{rate:g}", lambda arm, rate=rate: cell(arm, rate), "n") for rate in rates),
    ], group=lambda arm: arm.condition)  # fmt: skip
    own = sum(run.step for run in results.runs)
    seconds = sum(sum(run.time.get(k, 0.0) for k in ("train_s", "compile_s"))
                  for run in results.runs)  # fmt: skip
    spent = (
        f"Spent on this choice: {tuning['runs']} runs, {tuning['run_steps']:,} steps of a run,"
        f" {tuning['seconds']:.0f} s; on the runs that are reported: {len(results.runs)},"
        f" {own:,} steps, {seconds:.0f} s (training and compiling, the sum over runs)."
    )
    lead = muted(
        "Validation loss at step {rung}, by learning rate; the bold one was taken. Seeds {first}"
        " and on, which no reported run has: {seeds} for each rate. The schedule is that of the"
        " whole run. {spent}",
        rung=tuning["rungs"][-1], first=tuning["first_seed"], seeds=tuning["seeds"], spent=spent,
    )  # fmt: skip
    arms = [arm for arm in results.arms if arm.name in tuning["chosen"]]
    return [Section("rates", "How the rates were chosen", [lead, table(arms)])]


def _thousands(count: int | None) -> str | None:
    return None if count is None else f"{count:,}"


def _interval_plot(
    variant: Variant, gaps: Mapping[int, float], window: tuple[float, float] | None, paint: str
) -> Markup:
    """Return a row's small picture: seeds, mean and interval of the difference, and a line at 0."""
    if window is None:
        return Markup("")
    wide, tall = 150, 22

    def at(value: float) -> str:
        place = (value - window[0]) / (window[1] - window[0])
        return f"{2 + (wide - 4) * min(max(place, 0.0), 1.0):.1f}"

    parts = [tag("line", x1=at(0), x2=at(0), y1="0", y2=tall, cls="zero")]
    gap, words = variant.difference, "no difference"
    if gap is not None and gap.mean is not None:
        words = f"difference {number(gap.mean, True)}, {tables.span(gap, True)}"
        if gap.low is not None and gap.high is not None:
            parts.append(tag("line", x1=at(gap.low), x2=at(gap.high), y1="9", y2="9", stroke=paint,
                             **{"stroke-width": "2.5"}))  # fmt: skip
        parts += [
            tag("circle", cx=at(each), cy="17.5", r="1.8", fill="none", stroke=paint)
            for each in gaps.values()
        ]
        parts.append(tag("circle", cx=at(gap.mean), cy="9", r="4", fill=paint))
    return tag("svg", *parts, cls="row", viewBox=f"0 0 {wide} {tall}", width=wide, height=tall,
               role="img", **{"aria-label": words})  # fmt: skip


# --- the decoder and how to read the page ---------------------------------------------------------


def _decoder(results: Results, looks: Looks, diagram: Any) -> Section:
    """Return what is changed: the diagram, the parts, and the equation of every series."""
    form = explanations.equation(results.plan.get("rows") or {})
    changes = explanations.series_changes(results)
    marks = iter(range(1, len(results.arms) + 1))
    numbers = {s: "" if s == results.baseline else next(marks) for s in changes}
    arms = {s: [c for c in results.arms if c.series == s] for s in changes}

    def name(s: str) -> Markup:
        title = "" if results.x or arms[s][0].title == s else arms[s][0].title
        return stacked(dotted(looks[s].colour, s), title)

    def words(s: str) -> Markup:
        changed = explanations.change_text(changes[s])
        code = Markup(" ") + tag("code", changed) if changed else ""
        return Markup("{}{}").format(arms[s][0].description, code)

    def equation(s: str) -> str:
        return explanations.effect(results, changes[s], arms[s][0].rows)

    def parameters(s: str) -> Markup:
        counts = sorted({c.parameters for c in arms[s] if c.parameters is not None})
        return Markup("<br>").join(f"{count:,}" for count in counts)

    table = Table([
        view("Mark", lambda s: str(numbers[s])),
        view("Variant", name, "name"),
        view("What is changed", words, "words"),
        view("In the equation", equation, "words"),
        view("Parameters", parameters, "n"),
    ])  # fmt: skip
    baseline = prose('The baseline is <span class="equation">{}</span>.', form) if form else ""
    return Section(
        "parts", "The decoder and where it is changed",
        [
            *([diagram] if diagram else []),
            definitions((n, text.format(unit=results.unit)) for n, text in explanations.PARTS),
            tag("h3", "One equation"),
            "Every sub-layer, attention or MLP, computes the next stream h′ from the present one"
            " h:",
            tag("p", "h′ = P( a h + b Q( F( c N(h) ) ) )", cls="equation"),
            prose(
                "<p>F is the attention or the MLP. N is what it reads through, Q what its output"
                " passes, P what the whole stream passes: each is a norm or does nothing. a weighs"
                " the residual path, b the branch, c what the branch reads; all are 1 unless said."
                " {baseline} What each variant makes of it:</p>", baseline=baseline,
            ),
            table(changes),
        ],
        short="The decoder",
    )  # fmt: skip


def _reading(results: Results, more: Sequence[Any]) -> Section:
    return reading(
        "<b>Loss</b> is the mean of −ln p over the {unit}s of the evaluation text, where p is the"
        " probability that the model gave to the {unit} that came. Its unit is the nat; divided by"
        " ln 2 it is bits per {unit}. <b>Perplexity</b> is e to the loss: the number of equally"
        " likely choices that would be as hard. {references}",
        "<b>Interval.</b> From the final losses of n seeds: mean ± t e. The squared error e² is"
        " that of the seeds, s²/n with s the standard deviation (n − 1 in the denominator), and"
        " that of the text, the same of the losses on the stretches that the test text is divided"
        " into. t is the 97.5 % quantile of Student's t distribution; its degrees of freedom lie"
        " between those of the seeds and of the stretches (Satterthwaite). From seeds alone t is"
        " {t3:.2f} for 3 and {t5:.2f} for 5. Were the whole experiment repeated with new seeds and"
        " another text of this kind, about 95 of 100 such intervals would cover the mean over"
        " all, if losses scatter about normally. With few seeds that cannot be checked and the"
        " interval is itself uncertain: a wide one means that little is known, not that nothing is"
        " there. One seed gives no interval.",
        "<b>Difference.</b> Runs of one seed see the same batches, so a variant is compared with"
        " {base} seed by seed, and the interval is that of those differences. It can be much"
        " narrower than the intervals of the losses: two variants whose loss intervals overlap may"
        " still differ. “Shown” on this page means a p-value of the paired difference below 0.05"
        " after Holm's correction for all comparisons that the page makes; intervals are each"
        " one's own and not widened.",
        "<b>Divergence</b> is an outcome, worse than any loss: such runs are counted and shown with"
        " their step, and never enter a mean. A variant with more of them ranks behind every one"
        " with fewer, whatever the mean of its others.",
        "<b>What was looked at when.</b> Validation text, the first half of what is held out, is"
        " evaluated while training, and rates are chosen by it. Test text, the second half, is"
        " evaluated once, after the last step.",
        "<b>What varies.</b> Seeds vary the initial parameters and the order of the text. The"
        " interval says nothing about other texts, sizes, rates or longer training.",
        unit=results.unit, base=results.baseline, references=wording.references(results),
        t3=statistics.t_factor(3), t5=statistics.t_factor(5), more=more,
    )  # fmt: skip


# --- what was run ---------------------------------------------------------------------------------


def _record(results: Results, looks: Looks) -> Section:
    plan = results.plan
    return record(
        str(plan.get("command") or ""), [*_facts(results), *_machine(results)], plan.get("config"),
        details(f"All {len(results.runs)} runs", _runs(results, looks)(results.runs)),
        notes=plan.get("notes") or (), title=RUN,
    )  # fmt: skip


def _facts(results: Results) -> Iterator[tuple[str, Any]]:
    plan, unit = results.plan, results.unit
    corpus, evaluation = plan.get("corpus") or {}, plan.get("evaluation") or {}
    preset = f", preset {plan['preset']}" if plan.get("preset") else ""
    yield "Experiment", f"{plan.get('experiment') or '–'}{preset}"
    yield "Corpus", f"{corpus.get('name') or '–'}: {corpus.get('description') or ''}"
    yield "Corpus fingerprint", tag("code", corpus.get("fingerprint") or "–")
    if isinstance(files := corpus.get("files"), dict):
        yield "Files of the corpus", str(files.get("words") or "–")
    size = f"vocabulary of {corpus.get('vocabulary_size') or '–'}"
    text = "–"
    if corpus.get("train_tokens") is not None:
        held = corpus.get("held_out_tokens") or 0
        text = f"{corpus['train_tokens']:,} {unit}s for training, {held:,} held out, {size}"
    elif plan.get("task"):
        scored = f"{100 * plan['task']['scored_fraction']:.0f} % of the positions are scored"
        text = f"fresh sequences in every step, {size}; {scored}"
    yield "Text", text
    windows = f"{unit}s in {evaluation.get('windows') or 0:,} windows."
    counted = f" {evaluation['tokens']:,} {windows}" if evaluation.get("tokens") else ""
    yield "Evaluation set", f"{evaluation.get('description') or ''}{counted}"
    yield "Seeds", pretty(results.seeds)
    side = " (runs that train side by side count their time each)"
    times = {key: [run.time[key] for run in results.runs if key in run.time] for key in (
        "train_s", "compile_s", "peak_memory_mb")}  # fmt: skip
    for name, key, more in (("Training time", "train_s", side), ("Compile time", "compile_s", "")):
        total = f"{sum(times[key]):.1f} s, the sum over runs{more}"
        yield name, total if times[key] else "not recorded"
    memory = times["peak_memory_mb"]
    yield "Peak memory", f"{max(memory):.0f} MB" if memory else "not recorded"


_MACHINE = (
    *("versions", "platform", "devices", "cpu", "cores", "isa", "xla_flags", "commit", "flags"),
    *("hostname", "started"),
)
_TITLES = {"cpu": "CPU", "isa": "Instruction set", "xla_flags": "XLA flags", "hostname": "Host"}


def _machine(results: Results) -> Iterator[tuple[str, Markup]]:
    """Yield each field of the environments with its distinct values and how many runs had them."""
    known = [part["environment"] for run in results.runs for part in run.segments]
    extra = sorted({name for env in known for name in env} - set(_MACHINE))
    for name in (*_MACHINE, *extra):
        values = [pretty(env[name]) for env in known if name in env]
        if name == "started" and values:
            values = [" to ".join(dict.fromkeys((min(values), max(values))))]
        counts = Counter(values)
        said = (f"{v} ({n} runs)" if len(counts) > 1 else v for v, n in counts.items())
        if counts:
            title = _TITLES.get(name, name.replace("_", " ").capitalize())
            yield title, Markup("<br>").join(said)


def _runs(results: Results, looks: Looks) -> Table:
    arms = {arm.name: arm for arm in results.arms}

    def state(run: RunResult) -> str:
        return wording.state_text(run) + (f" ({run.reason})" if run.reason else "")

    def skipped(run: RunResult) -> int:
        return max([int(e.get("update/skipped") or 0) for e in run.evaluations], default=0)

    def name(run: RunResult) -> Markup:
        return dotted(looks[arms[run.arm].series].colour, run.arm)

    def seconds(run: RunResult) -> str | None:
        return f"{run.time['train_s']:.1f}" if "train_s" in run.time else None

    return Table([
        view("Run", lambda run: tag("code", run.id), "id"),
        view("Arm", name, "name"),
        view("Seed", lambda run: run.seed, "n"),
        view("Learning rate", lambda run: run.rates.learning_rate, "n"),
        view("Weight decay", lambda run: run.rates.weight_decay, "n"),
        view("Initial scale", lambda run: run.rates.init_scale, "n"),
        view("State", state),
        view("Final loss", lambda run: number(run.final_loss), "n"),
        view("Skipped updates", skipped, "n"),
        view("Training s", seconds, "n"),
    ])  # fmt: skip
