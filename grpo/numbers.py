"""Reading the one number that a short text names: what is not plainly one number is no value; nothing is evaluated.

The text's digits may be of any script and wrapped in markup, currency or units; arithmetic, bounds, ranges, dates and
a second value make it no value. Work is linear in the length, and callers bound the length.
"""

import re
import unicodedata
from fractions import Fraction

MAX_DIGITS = 50  # in one number
MAX_GOLD_CHARS = 500
INVISIBLE = (
    "[\0-\x08\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0]"
)

REWRITES = [  # what is looked through, in this order
    (INVISIBLE, ""),
    (r"[\u2010-\u2015\u2212\u2796]", "-"),  # hyphens, dashes, minus signs
    (r"<[/|]?[A-Za-z][^<>]*>", " "),  # HTML, nested tags
    (r"\{,\}|,\\!", ","),  # LaTeX thousands commas
    (r"\\[dtc]?frac *\{ *(-?[0-9.,]+) *\} *\{ *([0-9.,]+) *\}", r" \1/\2 "),
    (r"\\(?:boxed|fbox|text[a-z]*|math[a-z]+|left|right|displaystyle|q?quad|approx|[,;: ()[\]]|(?=%))", " "),
    (r"\^ *\{? *\\circ|[{}#]", " "),
    (r"([$£€] ?[0-9][0-9.,]*) ?m\b", r"\1M"),  # of money m is a million, else a metre
    (r"\\?[$¢-¥\u20a0-\u20cf]", " "),  # currency, math mode
    # Markdown around a number; a star or underscore between two numbers stays, as an operator.
    (r"(?<![0-9*_`])(?<![0-9] )[*_`]+(?=[^\s*_`])|(?<=[^\s*_`])[*_`]+(?![0-9*_`])", ""),
    (r"(?<![A-Za-z])([cdkm]?m|ft|in|yd|mi)(?:\^ ?)?[23](?!\w)", r"\1"),  # m2, cm^3
    (r"\b([0-9]{1,2}):00(?![0-9:])", r"\1"),  # whole hours
    (r"(?i)\b(?:minus|negative) (?=\W*[0-9])", "-"),
    (r"[^\S\n]+", " "),
    (r"(?<![0-9.,])[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9/]|[.,]?[0-9])", lambda m: m[0].replace(" ", "")),
]
SCALES = {"k": 3, "hundred": 2, "thousand": 3, "m": 6, "million": 6, "b": 9, "billion": 9, "trillion": 12}
NUMBER = r"((?:(?<![A-Za-z.])\.)?[0-9]+(?:[.,][0-9]+)*(?:[eE][-+]?[0-9]{1,2}(?![0-9]))?)"
GROUPED = re.compile(r"(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)?(?:\.[0-9]+)?(?:[eE].+)?")
QUANTITY = re.compile(  # sign, [whole] top [/ bottom], scale words
    rf"(?:(?<![\w)%])(?<![0-9)%] )([-+])[ (]*)?(?:{NUMBER} (?={NUMBER[1:-1]} ?/))?{NUMBER}(?: ?/ ?{NUMBER})?"
    r"((?:[ -]?(?:(?i:k|hundred|thousand|million|billion|trillion)s?|M|B)\b)*)")
CLAUSE = re.compile(r"(?i)[\n;]|,(?![0-9])|[.?!] |\b(?:or|and)\b|\((?=[^()]*=)")
# A bound, a range or a second value in words.
HEDGE = re.compile(r"(?i)[<>≤≥≠±]|!=|^\D*\bor\b|\bor\b\D*$|\band (?:\w+[ -])?(?:half|thirds?|quarters?)\b")
CHANGED = re.compile(r"""(?ix)  # with # for each number: what makes it another value than the one written
    [\\^×÷√π∞] | [-+]/?[ ]?\(*\# | \#[ ]?\+ | [-+/][ ]?$             # arithmetic, ranges, dates, 18+
  | \#[ ]?(?:[*]+|[/:·⋅%&|~_]|x|times|plus|by)[ ]?\#                 # 9**9, 3:2, 9 x 9
  | \#[\w'(]+\# | \#[ ]?-?[ ]?(?:[xy]|pi)\b                          # 0x12, 1_000, 9(9), 18x
  | (?:\bnot|n't)(?:[ ]\w+){0,2}[ ]?\# | \b(?:than|least|most|up[ ]to|over|under|above|below)[ ]?\#
  | \b(?:half|twice|double|triple)\b[^#]*\# | \#[ ]?(?:squared|cubed)
  | \b(?:tenths|hundred|thousand|million|billion|trillion)           # a scale word away from its number
""")


def plain(char: str) -> str:
    """Any script's digits as ASCII, ½ as 1/2, other numerals (², ③, 十) behind a ^, the rest as in NFKC."""
    folded = unicodedata.normalize("NFKC", char).replace("\u2044", "/")
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    return (" " if "/" in folded else "^") + folded if char.isnumeric() else folded


def clean(text: str) -> str:
    """Text with plain digits, without markup and currency."""
    text = "".join(map(plain, text))
    for pattern, to in REWRITES:
        text = re.sub(pattern, to, text)
    return text


def gold_value(answer: str) -> Fraction | None:
    """The gold as a number; None where it is not one or holds letters, too."""
    text = clean(answer[:MAX_GOLD_CHARS])
    return None if re.search("[A-Za-z]", text) else named_value(text)


def last_value(text: str) -> Fraction | None:
    """The last number anywhere in a text of any length, or None."""
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    numbers = QUANTITY.finditer(clean(text[max(0, end - 2 * MAX_DIGITS) : end + 20]))
    return ([None, *map(value_of, numbers)])[-1]


def body_value(text: str) -> Fraction | None:
    """The one value that a text names (of an equation, its last right side), or None."""
    return named_value(clean(text))


def named_value(text: str) -> Fraction | None:
    """The same of a cleaned text."""
    values = set()
    for clause in CLAUSE.split(text):
        side = clause.rpartition("=")[2]
        values.update(map(value_of, QUANTITY.finditer(side)))
        if CHANGED.search(QUANTITY.sub("#", side)):
            return None
    return values.pop() if len(values) == 1 and not HEDGE.search(text) else None


def value_of(quantity: re.Match) -> Fraction | None:
    """Its exact value; None where commas do not group by threes, or there are too many digits."""
    sign, whole, top, bottom, scales = quantity.groups()
    parts = [whole or "0", top, bottom or "1"]
    if not all(GROUPED.fullmatch(part) and len(part) <= MAX_DIGITS for part in parts):
        return None
    whole, top, bottom = (Fraction(part.replace(",", "")) for part in parts)
    if bottom == 0:
        return None
    value = whole + top / bottom
    for word in re.findall("[a-z]+", scales.lower()):
        value *= 10 ** SCALES[word.rstrip("s")]
    return -value if sign == "-" else value
