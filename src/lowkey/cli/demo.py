"""`lowkey demo`: fine-tune MiniLM privately on the mails that the package carries, and say what it was worth and what it cost."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowkey.cli.output import ProgressBar, aligned, duration, paragraph, section, wrapped
from lowkey.cli.parser import add_command, natural, open_probability, positive_float, positive_int
from lowkey.errors import ConfigError

if TYPE_CHECKING:
    from lowkey.account import Statement
    from lowkey.cli.parser import Subparsers
    from lowkey.cli.private_training import Settings
    from lowkey.cli.step_cost import Cost
    from lowkey.cli.text_model import TextModel
    from lowkey.data import Mails

_COST_ROUNDS = 5
_METHOD_NAMES = {"grape": "DP-GRAPE", "dpsgd": "DP-SGD (full gradient)"}
_DETAILS = """\
Fine-tune MiniLM on 4,502 real mails (spam or not) with a stated privacy guarantee.
Prints the accuracy beside the majority share and a bag of words, epsilon with its whole
statement, and the time and memory of a step beside ordinary training. Needs no network."""
_EXAMPLES = """\
  lowkey demo                                   the whole thing, in under three minutes on two cores
  lowkey demo --epsilon 1                       a stronger guarantee
  lowkey demo --method dpsgd                    the full gradient instead of a sketch; slower
  lowkey demo --num-steps 10 --skip-cost        a quick look
  lowkey demo --out run/                        keep the model, the ledger and the numbers"""
_TUNED = (
    "The learning rate and the like were chosen by looking at these mails. They are public, so nothing is hidden in epsilon; "
    "on private mails such a search has its own price."
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the demo found.

    Fields:
        num_test: Mails that the shares are of.
        majority: Share of the more frequent class.
        bag_of_words: Accuracy of the baseline, which has no privacy.
        private: Accuracy of the privately tuned model.
        training_seconds: How long the private training took.
    """

    num_test: int
    majority: float
    bag_of_words: float
    private: float
    training_seconds: float


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "demo",
        run=run,
        summary="fine-tune MiniLM privately on real mails and show the result",
        details=_DETAILS,
        examples=_EXAMPLES,
    )
    add = parser.add_argument
    add("--epsilon", type=positive_float, default=8.0, metavar="X", help="the privacy budget (default: %(default)s)")
    add("--delta", type=open_probability, default=1e-5, metavar="X", help="the failure probability (default: %(default)s)")
    add("--method", choices=sorted(_METHOD_NAMES), default="grape", help="a random sketch, or the full gradient (default: %(default)s)")
    add("--rank", type=positive_int, metavar="N", default=16, help="kept dimensions per matrix, for grape (default: %(default)s)")
    add("--num-steps", type=positive_int, metavar="N", default=40, help="releases (default: %(default)s)")
    add("--expected-batch-size", type=positive_int, metavar="N", default=128, help="mean number of mails in a step (default: %(default)s)")
    add("--learning-rate", type=positive_float, metavar="X", help="AdamW's (default: 0.003)")
    add("--clip-norm", type=positive_float, default=1.0, metavar="X", help="L2 limit per mail (default: %(default)s)")
    add("--num-tokens", type=positive_int, metavar="N", default=64, help="tokens read of each mail (default: %(default)s)")
    add("--num-mails", type=positive_int, metavar="N", help="use only the first so many mails of each split (default: all)")
    add(
        "--seed",
        type=natural,
        metavar="N",
        default=0,
        help="draws the fresh head and the bases; never the noise or the sample (default: %(default)s)",
    )
    add("--model", type=Path, metavar="FOLDER", help="a local Hugging Face model instead of MiniLM")
    add("--out", type=Path, metavar="FOLDER", help="a new folder for the model, the ledger and result.json")
    add("--skip-cost", action="store_true", help="do not measure time and memory")


def run(args: Namespace) -> int:
    """Run the demo and print its summary."""
    start = time.monotonic()
    _make_folder(args.out)
    _tell("Loading torch, the model and the mails ...")
    from lowkey.cli import text_model
    from lowkey.data import load_mails

    model = text_model.load_text_model(args.model, seed=args.seed)
    text_model.check_num_tokens(model.network, args.num_tokens)
    mails = load_mails().first(args.num_mails)
    settings = _calibrate(args, num_examples=len(mails.train))
    _introduce(model, mails, settings)
    outcome, statement = _train_and_test(model, mails, settings, num_tokens=args.num_tokens)
    costs = None if args.skip_cost else _measure_cost(args, model)
    _summarise(args, model, outcome, statement, costs)
    if args.out is not None:
        _save(args, model, outcome, statement, costs)
    _tell(f"\nDone in {duration(time.monotonic() - start)}.")
    return 0


def _make_folder(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"out='{folder}' cannot be made a folder ({error.strerror}). Results go there. Name another one.") from error
    if is_used:
        raise ConfigError(f"out='{folder}' is not empty. A run has a ledger and a model of its own. Name a new folder, or empty this one.")


def _calibrate(args: Namespace, *, num_examples: int) -> Settings:
    import lowkey as lk
    from lowkey.cli.private_training import LEARNING_RATE, Settings
    from lowkey.cli.step_cost import choose_method

    plan = lk.calibrate(
        epsilon=args.epsilon,
        delta=args.delta,
        num_examples=num_examples,
        expected_batch_size=args.expected_batch_size,
        num_steps=args.num_steps,
    )
    return Settings(
        method=choose_method(args.method, args.rank),
        plan=plan,
        clip_norm=args.clip_norm,
        learning_rate=args.learning_rate or LEARNING_RATE,
        seed=args.seed,
        ledger=args.out / "ledger" if args.out else None,
    )


def _introduce(model: TextModel, mails: Mails, settings: Settings) -> None:
    plan = settings.plan
    _tell(
        f"{len(mails.train):,} mails to learn from, {len(mails.test):,} to test on; "
        f"{model.name}, {model.num_trained / 1e6:.1f} M weights to train."
    )
    _tell(f"{plan.num_steps} steps of about {plan.expected_batch_size} mails, noise {plan.noise_multiplier:.3f} times the clip norm.\n")


def _train_and_test(model: TextModel, mails: Mails, settings: Settings, *, num_tokens: int) -> tuple[Outcome, Statement]:
    from lowkey.cli.private_training import train_privately
    from lowkey.cli.text_model import accuracy, encode, num_batches

    train, test = (encode(model.tokenizer, split, num_tokens=num_tokens) for split in (mails.train, mails.test))
    start = time.monotonic()
    with ProgressBar("training privately", settings.plan.num_steps) as bar:
        statement = train_privately(model, train, settings, bar.advance)
    training_seconds = time.monotonic() - start
    with ProgressBar("testing           ", num_batches(test)) as bar:
        private = accuracy(model.network, test, bar.advance)
    num_spam = sum(mail.is_spam for mail in mails.test)
    outcome = Outcome(
        num_test=len(mails.test),
        majority=max(num_spam, len(mails.test) - num_spam) / len(mails.test),
        bag_of_words=_bag_of_words_accuracy(mails),
        private=private,
        training_seconds=training_seconds,
    )
    return outcome, statement


def _bag_of_words_accuracy(mails: Mails) -> float:
    from lowkey.data import fit_bag_of_words

    baseline = fit_bag_of_words([mail.text for mail in mails.train], [mail.is_spam for mail in mails.train])
    guesses = baseline.predict([mail.text for mail in mails.test])
    return sum(bool(guess) == mail.is_spam for guess, mail in zip(guesses, mails.test, strict=True)) / len(mails.test)


def _measure_cost(args: Namespace, model: TextModel) -> tuple[Cost, Cost]:
    from lowkey.cli.private_training import MICROBATCH
    from lowkey.cli.step_cost import Workload, measure

    folder = None if args.model is None else str(args.model)
    workload = Workload(folder=folder, method=args.method, rank=args.rank, batch_size=MICROBATCH, num_tokens=args.num_tokens)
    with ProgressBar("measuring cost    ", _COST_ROUNDS + 2) as bar:
        return measure(model.network, workload, num_rounds=_COST_ROUNDS, on_turn=bar.advance)


# -- the summary ----------------------------------------------------------------------------------------------------------


def _summarise(args: Namespace, model: TextModel, outcome: Outcome, statement: Statement, costs: tuple[Cost, Cost] | None) -> None:
    from lowkey.account.statement import format_up

    label = _METHOD_NAMES[args.method] + (f" rank {args.rank}" if args.method == "grape" else "")
    rows = [
        ("always the more frequent answer", f"{outcome.majority:.3f}", "ε = 0"),
        (f"{model.name}, {label}", f"{outcome.private:.3f}", f"ε = {format_up(statement.epsilon)}"),
        ("bag of words, not private", f"{outcome.bag_of_words:.3f}", "ε = ∞"),
    ]
    _tell(section(f"Accuracy on {outcome.num_test:,} mails kept aside", *aligned(rows)))
    _tell(section("Privacy", *wrapped(str(statement)), "", *paragraph(_TUNED)))
    if costs is not None:
        _tell(_cost_section(args, *costs))


def _cost_section(args: Namespace, ordinary: Cost, private: Cost) -> str:
    from lowkey.cli.private_training import MICROBATCH

    rows = [
        ("", "time", "memory above idle"),
        ("ordinary training, AdamW", duration(ordinary.seconds), _mebibytes(ordinary.memory_bytes)),
        (f"private, {_METHOD_NAMES[args.method]}", duration(private.seconds), _mebibytes(private.memory_bytes)),
        ("ratio", f"{private.seconds / ordinary.seconds:.2f}", _ratio(private.memory_bytes, ordinary.memory_bytes)),
    ]
    return section(f"Cost of one step on {MICROBATCH} mails of {args.num_tokens} tokens, measured side by side", *aligned(rows))


def _mebibytes(number: int | None) -> str:
    return "not measured" if number is None else f"{number / 2**20:.0f} MiB"


def _ratio(private: int | None, ordinary: int | None) -> str:
    return "-" if private is None or not ordinary else f"{private / ordinary:.2f}"


def _save(args: Namespace, model: TextModel, outcome: Outcome, statement: Statement, costs: tuple[Cost, Cost] | None) -> None:
    model.network.save_pretrained(args.out / "model")  # pyright: ignore[reportCallIssue]  # a PreTrainedModel
    model.tokenizer.save_pretrained(args.out / "model")
    result = {
        "accuracy": asdict(outcome),
        "privacy": {"epsilon": statement.epsilon, "delta": statement.delta, "statement": str(statement)},
        "cost": None if costs is None else {"ordinary": asdict(costs[0]), "private": asdict(costs[1])},
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items() if name != "run"},
    }
    (args.out / "result.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _tell(f"\nThe model, the ledger and result.json are in {args.out}.")


def _tell(text: str) -> None:
    print(text, flush=True)
