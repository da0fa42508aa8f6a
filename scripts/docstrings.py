"""Docstrings begin as what they describe: a function's with a verb, an attribute's and a class's with a noun.

    python scripts/docstrings.py [PATH ...]       prints what does not; fails if anything is printed
    python scripts/docstrings.py --count          numbers by folder

Properties count as attributes. A citation in front (`B3 · BucketServe Eq. 5:`) is skipped; `__init__` may begin with a
parameter in backticks. Decided by word lists: a verb that is missing in `VERBS` is added there.
"""
# ruff: noqa: SIM905 -- lists of words read better as text

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("common", "kernels", "services", "scripts")

CLOSED = frozenset(
    """
    of in on at by for from with without within between behind before after beside besides under over above below
    beyond along against among into onto until till since during through per to toward towards up out off about
    across around despite except inside outside near via than as like unlike and or but nor so yet if when while
    where whereas whether unless because though although whenever wherever how why it its itself this that these
    those they their theirs them he she his her who whom whose whoever which whichever what whatever nothing
    something anything everything everyone someone anyone nobody none another others such i my mine we our ours us
    you your yours there here also only never not now then ever still already always again once twice today lately
    roughly nearly almost exactly hardly often initially likewise meanwhile however together apart aside ahead back
    instead straight perhaps just mostly usually rather too very afterwards elsewhere is are was were be been being
    has have had having does do did can could may might must shall should will would
    """.split()
)
"""Prepositions, conjunctions, pronouns, adverbs, auxiliaries: they begin no docstring."""

MODIFIERS = frozenset(
    """
    one all each every both either neither any some several many much more most few fewer less least no own same
    other two three four longer shorter higher lower larger smaller older newer best worst oldest newest youngest
    longest shortest highest lowest largest smallest latest earliest due free empty alone first second last next
    begun bought bound built chosen cut done drawn driven fed found forgotten frozen given gone heard held hidden
    kept known left lent lost made meant met paid put read run said seen sent set shown shut spent split taken told
    thrown understood written
    """.split()
)
"""Fine before a noun, wrong before a word of `CLOSED` or at an end; participles in -ed and -ing are known by that."""

NOUNS = frozenset(
    """
    speed seed feed need shed string ring king thing spring
    """.split()
)
"""Nouns that end like participles."""

VERBS = frozenset(
    """
    abort accept account acquire act adapt add adjust admit adopt advance aggregate aim allocate allow announce
    answer append apply arrange ask assemble assert assign assume attach attend balance begin bench bind bisect
    block book boot borrow bound break bring broadcast build bump bundle cache calibrate call cancel cap capture
    cast charge check choose claim clamp clear close coalesce collect combine commit compare compile complete
    compute concatenate configure confirm connect consume contain continue convert copy correct count cover create
    cut cycle decide decline decode decrement defer define delay delete deliver demote dequantize derive describe
    deserialize detach detect determine dial disable discard disconnect discover dispatch distribute divide double
    download draft drain draw drop dump echo emulate enable encode end enqueue ensure enter enumerate erase escape
    establish estimate evaluate evict exclude execute exit expand expect expire export expose extend extract fade
    fail fall feed fetch fill filter find finish fit fix flatten flush fold follow force forecast forget fork form
    format forward free freeze gather generate get give go grant group grow guard halve hand handle hash head hide
    hold host identify ignore implement import include increment index infer initialize insert inspect install
    interpolate interrupt invalidate invert invoke issue iterate join judge keep kill launch lead learn lease leave
    lend let level lift limit link list listen load localize lock log look lose lower maintain make map mark mask
    match measure merge mix model mount move multiply name narrow normalize note notify number observe obtain offer
    offload omit open optimize order overwrite own pack pad page park parse pass patch pause peek perform permit
    permute persist pick pin place plan plot poll pop post postpone predict preempt prefer prefetch prepare present
    preserve press prevent price print probe process produce profile promise promote propagate propose protect prove
    provide publish pull push put quantize queue raise rank rate reach read reap rebuild recall receive recompute
    reconnect record recover redraw reduce refresh refund refuse register reject relay release remember remove
    rename render renew reorder repair repeat replace replay reply report request rerun rescue reserve reset resolve
    rest restart restore restrict resubmit resume retain retire retract retrieve retry return reuse review rewrite
    roll rotate round route run sample satisfy save say scale scan schedule score seal search see seek select send
    sense separate serialize serve set settle shape share shift show shrink sign signal simulate size skip sleep
    slice smooth solve sort spawn specialize specify split spread stack standardize start state steer step stop
    store stream strip study submit subtract sum summarize supply suspend swap switch synchronize take target tell
    terminate test throw tick time tokenise tokenize tolerate touch trace track trade train transfer transform
    translate transpose truncate try turn unblock undo unlink unlock unpack unregister unwrap update upload use
    validate value vary verify visit wait wake walk warm warn watch weigh widen withdraw work wrap write yield
    """.split()
)
"""A verb that is missing belongs here."""
THIRD = frozenset(
    "owns keeps makes stands says holds builds chooses decides delivers receives sends gives takes raises".split()
)
CITED = re.compile(
    r"(?:[A-Z]{1,2}\d+(?:[–-][A-Z]?\d+)?(?:,? (?:and )?[A-Z]\d+)*"
    r"|(?:BROS|BucketServe|DynaServe|EcoServe|AlignedServe)[^:·]{0,60}"
    r"|(?:§|Alg\.|Algorithm|Eq\.|Fig\.|Section|Table)[^:·]{0,60})\s*[·:]\s*"
)
WORD = re.compile(r"[\s\"'“(\[]*(`[^`]*`|[A-Za-z][\w’'\-/]*|[^\sA-Za-z`]\S*)")


def fault(kind: str, name: str, text: str) -> str:
    """Return what is wrong with how a docstring begins, or an empty string."""
    text = text.strip()
    while cited := CITED.match(text):
        text = text[cited.end() :]
    found = WORD.match(text)
    if found is None:
        return "no word"
    first, rest = found[1], text[found.end() :]
    word, stopped = first.lower(), rest[:1] in ".,;!?" or not rest.strip()
    follower = "" if stopped or rest[:1] == ":" else (WORD.match(rest) or ["", ""])[1].lower()
    plain = re.fullmatch(r"[a-z]+(-[a-z]+)*", word) is not None
    if kind == "function":
        if name == "__init__" and first.startswith("`"):
            return ""
        if word in VERBS and follower not in ("of", "and") and not first.endswith("'s"):
            return ""
        return f"begins with {first!r}, not with a verb"
    if not plain or (kind == "attribute" and word == "whether"):
        return ""
    participle = word not in NOUNS and (word.endswith("ed") or (word.endswith("ing") and follower != "of"))
    loose = stopped or follower in CLOSED
    if word in CLOSED or (loose and (word in MODIFIERS or participle)) or (word in THIRD and kind != "module"):
        return f"begins with {first!r}, not with a noun"
    return ""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str, str]]:
    """Yield line, kind, name and text of every docstring but the module's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
            text := ast.get_docstring(node)
        ):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            if any(ast.unparse(each).endswith("property") for each in node.decorator_list):
                kind = "attribute"
            yield node.body[0].lineno, kind, node.name, text
        body = getattr(node, "body", None)
        for before, after in pairwise(body) if isinstance(body, list) else ():
            match before, after:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                    yield after.lineno, "attribute", "", text


def main(arguments: list[str]) -> int:
    counts: Counter[str] = Counter()
    paths = [Path(each) for each in arguments if not each.startswith("-")] or [ROOT / part for part in PARTS]
    for file in sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])):
        for line, kind, name, text in docstrings(ast.parse(file.read_text(encoding="utf-8"))):
            if found := fault(kind, name, text):
                counts[str(file.parent)] += 1
                if "--count" not in arguments:
                    print(f"{file}:{line}: {name or kind}: {found}")
    if "--count" in arguments:
        print("\n".join(f"{count:5} {folder}" for folder, count in sorted(counts.items())))
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
