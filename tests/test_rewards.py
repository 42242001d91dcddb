"""The reward contract: gathered public cases, further cases, properties of any input, real gold answers."""

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils import (
    ANSWER_REWARD,
    FORMAT_REWARD,
    check_answer,
    check_answer_lenient,
    check_format,
    gold_value,
    reward_function,
)

SHARED = Path(__file__).parents[1].parent / "shared"
CASES = SHARED / "cases" / "reward_cases.jsonl"
GSM8K = SHARED / "gsm8k"

# What stands in the answer block, the gold, whether it is right, and why.
BODIES = [
    # sign
    ("-$5", "-5", True, "currency between sign and digits"),
    ("$-5", "-5", True, "sign after the currency"),
    ("-$5", "5", False, "the sign counts behind a currency"),
    ("-18", "18", False, "a negative number is not its absolute value"),
    ("\u201312", "-12", True, "en dash as minus"),
    ("\uff0d12", "-12", True, "full-width minus"),
    ("\u201112", "12", False, "a non-breaking hyphen is a minus look-alike too"),
    ("-**18**", "-18", True, "bold between sign and digits"),
    ("-**18**", "18", False, "bold does not hide a sign"),
    ("**-18**", "-18", True, "sign inside the bold"),
    ("-(18)", "18", False, "brackets do not hide a sign"),
    ("-\n18", "18", False, "a line break does not hide a sign"),
    ("minus 10", "-10", True, "the sign as a word"),
    ("negative 10", "10", False, "the sign as a word counts"),
    ("The change is - 12 points.", "-12", True, "a spaced sign inside a sentence"),
    ("--18", "18", False, "two signs are arithmetic"),
    ("\u00b118", "18", False, "plus-minus names two values"),
    ("+/-18", "18", False, "plus-minus in ASCII"),
    ("-0", "0", True, "minus zero is zero"),
    ("0", "-0", True, "and the other way round"),
    # digits of other kinds
    ("\u0661\u0668", "18", True, "decimal digits of any script have one value each"),
    ("\U0001d7cf\U0001d7d6", "18", True, "mathematical bold digits"),
    ("\uff11\uff0c\uff12\uff13\uff14", "1234", True, "full-width comma between full-width digits"),
    ("\uff041\uff18\uff0e\uff15\uff05", "18.5", True, "full-width currency, point and percent"),
    ("18\u00b2", "18", False, "a superscript is a power"),
    ("18\u00b2", "182", False, "a superscript is not a digit"),
    ("1\u2467", "18", False, "a circled eight is not a digit"),
    ("2\u00bd", "2.5", True, "two and a half"),
    ("\u00bd", "0.5", True, "a vulgar fraction alone"),
    ("\u00bd", "2", False, "not its denominator"),
    ("\u5341\u516b", "18", False, "number words of any language are not digits"),
    ("1\u200b8", "18", True, "zero-width space inside"),
    ("\u202e18", "18", True, "a direction mark is invisible"),
    ("18\u3002", "18", True, "ideographic full stop"),
    ("18\u300120", "18", False, "ideographic comma lists two values"),
    # grouping
    ("1,234,567", "1234567", True, "two commas"),
    ("12,34,567", "1234567", False, "groups that are not of three"),
    ("1234,567", "1234567", False, "a first group of four"),
    ("0,018", "18", False, "a decimal comma, not a group"),
    ("1,000,00", "1000", False, "a last group of two"),
    ("1.234,56", "1234.56", False, "European grouping is not read"),
    ("1.080", "1080", False, "a full stop is a decimal point"),
    ("1.2.3", "1.2", False, "a version is no number"),
    ("1 234 567", "1234567", True, "spaces in groups of three"),
    ("1\u202f000", "1000", True, "narrow no-break space as group"),
    ("1 80", "180", False, "a space that groups by two"),
    ("18 200", "18", False, "read as one number, and not the gold"),
    ("1\n000", "1000", False, "a line break does not group"),
    ("1_000", "1000", False, "an underscore does not group"),
    ("1'000", "1000", False, "an apostrophe does not group"),
    ("18,", "18", True, "a comma at the end"),
    (".18", "18", False, "a leading point makes a fraction"),
    (".5", "0.5", True, "a leading point"),
    ("The answer is...18", "18", True, "three dots are not a decimal point"),
    ("18..20", "18", False, "a range with dots"),
    ("18\u202620", "18", False, "a range with an ellipsis"),
    ("18.0000000000000000000000001", "18", False, "no tolerance"),
    ("17.999999999999999999", "18", False, "no rounding"),
    ("00018.500", "18.5", True, "zeros at both ends"),
    # markup
    ("__18__", "18", True, "bold by underscores"),
    ("`18`", "18", True, "code"),
    ("```\n18\n```", "18", True, "code block"),
    ("***18***", "18", True, "bold italic"),
    ("**18** dollars", "18", True, "bold and a unit"),
    ("**18**k", "18", False, "a scale letter behind bold"),
    ("<b>18</b>", "18", True, "HTML bold"),
    ("18<br>20", "18", False, "HTML between two values"),
    ("~~20~~ 18", "18", False, "struck out, but named"),
    ("(18)", "18", True, "brackets are no minus"),
    ("[18]", "18", True, "square brackets"),
    ('"18"', "18", True, "quotes"),
    ("$$18$$", "18", True, "display math"),
    ("\\(18\\)", "18", True, "inline math"),
    ("\\[ 18 \\]", "18", True, "display math in brackets"),
    ("\\$18", "18", True, "escaped currency"),
    ("18\\%", "18", True, "escaped percent"),
    ("18\\text{ dollars}", "18", True, "LaTeX unit"),
    ("\\boxed{\\text{18}}", "18", True, "nested wrapping"),
    ("\\boxed{18} \\boxed{20}", "18", False, "two boxes that disagree"),
    ("1{,}080", "1080", True, "LaTeX thousands comma"),
    ("1\\,080", "1080", True, "LaTeX thin space"),
    ("\\frac{36}{2}", "18", True, "LaTeX fraction"),
    ("\\dfrac{1}{2}", "0.5", True, "LaTeX display fraction"),
    ("\\textbf{18}", "18", True, "LaTeX bold"),
    ("-\\frac{36}{2}", "-18", True, "sign before a LaTeX fraction"),
    ("2\\frac{1}{2}", "2.5", True, "LaTeX mixed number"),
    ("\\sqrt{18}", "18", False, "a root is another value"),
    ("18\\pi", "18", False, "times pi"),
    ("18^\\circ", "18", True, "degrees"),
    ("9 \\times 2 = 18", "18", True, "LaTeX arithmetic left of the last ="),
    ("9 \\times 9", "9", False, "LaTeX arithmetic is not evaluated, nor looked through"),
    ("x \\geq 18", "18", False, "LaTeX inequality"),
    ('{"answer": 18}', "18", True, "JSON"),
    ("18[1]", "18", False, "a footnote names a second number"),
    ("18<|im_end|>", "18", True, "a special token inside the block"),
    # arithmetic and relations
    ("9 * 2", "18", False, "nothing is evaluated"),
    ("9 + 9", "9", False, "a sum of equal numbers is not that number"),
    ("9+9", "9", False, "the same without spaces"),
    ("9 * 9", "9", False, "a product"),
    ("9**9", "9", False, "a power"),
    ("9**9**9", "9", False, "a power tower"),
    ("9^9", "9", False, "a power with a caret"),
    ("9 x 9", "9", False, "a product with a letter"),
    ("9 \u00d7 9", "9", False, "a product with a cross"),
    ("9 times 9", "9", False, "a product in words"),
    ("9 plus 9", "9", False, "a sum in words"),
    ("9(9)", "9", False, "a product by brackets"),
    ("9 - 9", "9", False, "a difference"),
    ("18-18", "18", False, "a range of equal ends"),
    ("18!", "18", True, "an exclamation mark"),
    ("38 % 20", "18", False, "a remainder"),
    ("x - 18", "18", False, "an expression"),
    ("18x", "18", False, "a multiple of x"),
    ("18 + x", "18", False, "a sum with x"),
    ("18+", "18", False, "18 or more"),
    ("<18", "18", False, "less than"),
    (">= 18", "18", False, "at least"),
    ("\u2264 18", "18", False, "at most"),
    ("x >= 18", "18", False, "an inequality with an = in it"),
    ("x != 18", "18", False, "unequal"),
    ("\u2260 18", "18", False, "unequal in one sign"),
    ("\u2248 18", "18", True, "the approximate value named is compared exactly"),
    ("about 18", "18", True, "the same in words"),
    ("at least 18", "18", False, "a bound in words"),
    ("more than 18", "18", False, "a bound in words"),
    ("not 18", "18", False, "a denial"),
    ("It isn't 18.", "18", False, "a denial"),
    ("18, not counting the tip", "18", True, "the denial is of something else"),
    ("9 + 9 = 18", "18", True, "an equation"),
    ("9 * 2 = 36 / 2 = 18", "18", True, "a chain"),
    ("18 = 20", "18", False, "the last right side counts"),
    ("18 = 9 * 2", "18", False, "the last right side is not a value"),
    ("x = 18 or 20", "18", False, "a right side with two values"),
    ("x = 20 or x = 18", "18", False, "two equations"),
    ("x = 20, y = 18", "18", False, "two equations"),
    ("x = 20\nx = 18", "18", False, "two equations"),
    ("20; 9 * 2 = 18", "18", False, "a value, then an equation of another"),
    ("9 * 2 = 18, so she makes $18.", "18", True, "an equation and a sentence that agree"),
    ("Total = $18.00", "18", True, "a word, an equals sign, a price"),
    # fractions, ratios, times, dates
    ("36 / 2", "18", True, "a fraction with spaces"),
    ("2 1/2", "2.5", True, "a mixed number"),
    ("-2 1/2", "-2.5", True, "a negative mixed number"),
    ("18/0", "18", False, "division by zero"),
    ("1/3", "0.3333333333", False, "exact, not close"),
    ("18/1/1", "18", False, "a chain of slashes"),
    ("18/05/2024", "18", False, "a date"),
    ("2024-05-18", "18", False, "an ISO date"),
    ("May 18, 2024", "18", False, "a date in words"),
    ("3:2", "3", False, "a ratio"),
    ("18:18", "18", False, "a ratio of equals"),
    ("18:00", "18", True, "a whole hour"),
    ("9:00-9:30", "9", False, "two times"),
    ("12:00:30", "12", False, "seconds"),
    ("9am", "9", True, "a clock hour, glued"),
    ("18/day", "18", True, "a rate"),
    ("18 km/h", "18", True, "a rate unit"),
    ("18th", "18", True, "an ordinal names its number"),
    # units
    ("18kg", "18", True, "a glued unit"),
    ("18 m2", "18", True, "a unit with a digit"),
    ("18 cm^3", "18", True, "a unit with a power"),
    ("18 ft\u00b2", "18", True, "a unit with a superscript"),
    ("18 in 2 days", "18", False, "a preposition, not inches"),
    ("18\u00b0C", "18", True, "degrees Celsius"),
    ("US$18", "18", True, "letters and a currency sign"),
    ("18 USD", "18", True, "a currency code"),
    ("18\u00a2", "18", True, "cents sign"),
    ("7 dozen", "7", True, "dozen is a unit: golds of such questions count dozens"),
    ("18 (eighteen)", "18", True, "the same value in words"),
    ("eighteen", "18", False, "digits are asked for"),
    ("18 and a half", "18", False, "half more"),
    ("half of 18", "18", False, "half of it"),
    ("18 squared", "18", False, "a power in words"),
    # scale
    ("18 thousand", "18", False, "a scale word"),
    ("18 thousand", "18000", True, "its value"),
    ("18K", "18000", True, "a scale letter"),
    ("$1.45M", "1450000", True, "millions"),
    ("$18m", "18", False, "of money, m is a million"),
    ("18m", "18", True, "else it is a metre"),
    ("2 hundred thousand", "200,000", True, "two scale words"),
    ("18 (in thousands)", "18", False, "a scale word further on"),
    ("1/2 million", "500000", True, "a fraction of a scale"),
    ("18 millionths", "18", False, "a scale downwards"),
    ("18 tenths", "18", False, "a scale downwards"),
    ("18-", "18", False, "a sign behind, as accountants write it"),
    ("18 5/8", "18", False, "a mixed number"),
    ("18 (not 20)", "18", False, "the denied value is named, too"),
    ("18 = 18 = 20 - 2", "18", False, "a chain that ends in arithmetic"),
    ("20 (9 * 2 = 18)", "18", False, "a bracketed equation of another value"),
    ("18 (9 * 2 = 18)", "18", True, "a bracketed equation that agrees"),
    ("(9 + 9) * 1 = 18", "18", True, "brackets on the left side"),
    ("Rs.18", "18", True, "a full stop of an abbreviation"),
    ("18-hour", "18", True, "a hyphen between number and unit"),
    ("covid-19", "19", False, "a hyphen between word and number is no plain value"),
    ("\u201c18\u201d", "18", True, "curly quotes"),
    ("**Answer: $18**", "18", True, "bold around a label and a price"),
    ("18 dollars and 0 cents", "18", False, "a second number is a second value"),
    ("18 =", "18", False, "an equation without a right side"),
    ("\\boxed{18 \\text{ dollars}}", "18", True, "a unit inside the box"),
    ("\\left(18\\right)", "18", True, "LaTeX brackets"),
    ("18\u03c0", "18", False, "times pi"),
    ("\u221a18", "18", False, "a root"),
    ("\U0001f600 18", "18", True, "an emoji is no value"),
    ("1\u03368\u0336", "18", False, "struck out by combining marks"),
    ("18e0", "18", True, "scientific notation has an exact value"),
    ("1e1", "1", False, "the exponent counts"),
    ("1e0001", "1", False, "a longer exponent is refused"),
    ("0x12", "18", False, "hexadecimal is not read"),
    ("0x12", "12", False, "nor its digits"),
    # percent
    ("18 percent", "18", True, "percent as a word"),
    ("18%", "0.18", False, "no rescaling"),
    ("20%-30%", "20", False, "a range of percents"),
    # hedges
    ("18, 18", "18", True, "the same value twice"),
    ("18 18", "18", True, "the same value twice, spaced"),
    ("18\n18.00", "18", True, "the same value on two lines"),
    ("18\n20", "20", False, "two values on two lines"),
    ("18 dollars or $18.00", "18", True, "the same value twice, with or"),
    ("18or20", "18", False, "a glued or"),
    ("18 or twenty", "18", False, "the second value in words"),
    ("twenty or 18", "18", False, "the first value in words"),
    ("18 or more", "18", False, "an open range"),
    ("18 OR 20", "20", False, "capitals"),
    ("between 18 and 20", "18", False, "a range in words"),
    ("18 to 20", "20", False, "a range in words"),
    ("18\u201320", "18", False, "a range with an en dash"),
    ("18 ~ 18", "18", False, "a range with a tilde"),
    ("18/20", "18", False, "a slash between two candidates is a fraction"),
    ("18|20", "18", False, "a bar between two candidates"),
    ("18 (or 20)", "18", False, "the second in brackets"),
    ("18 (20)", "18", False, "the second in brackets, without a word"),
    ("1. 18", "18", False, "a list number is a second value"),
    ("17 18 19", "18", False, "a window"),
    ("17\u00a018\u00a019", "18", False, "a window with no-break spaces"),
    ("01234567890123456789", "18", False, "all digits"),
    ("18" + " " * 50 + "20", "18", False, "far apart"),
    ("18" + "\n" * 450 + "20", "18", False, "further apart"),
    ("18" + "\n" * 5000 + "20", "18", False, "beyond the longest answer"),
    # nothing named
    ("inf", "0", False, "not a number"),
    ("-", "0", False, "a sign alone"),
    ("$", "0", False, "a currency alone"),
    (".", "0", False, "a full stop alone"),
    ("None", "0", False, "a word"),
    ("unknown", "unknown", True, "a gold that is text"),
    ("  \\frac{a}{b}\n", "\\frac{a}{b}", True, "a gold that is LaTeX"),
    ("x + 1", "x  +\n1", True, "whitespace of a text gold is normalised"),
    ("x + 2", "x + 1", False, "another text"),
    ("m^3", "m^2", False, "a text gold is compared as it stands"),
    ("x\u00b3", "x\u00b2", False, "superscripts of a text gold count"),
    ("3", "3a", False, "a gold that is more than a number is text"),
    ("June 18", "May 18", False, "the same for a date"),
    ("", "", False, "an empty gold equals nothing"),
    ("$", "", False, "nor what is empty when cleaned"),
]

THINK = "<think>9 * 2 = 18</think>"
RIGHT = THINK + "<answer>18</answer>"
# The whole response, the gold, its two verdicts, and why.
RESPONSES = [
    (RIGHT + "\n\n<|im_end|>\n<|endoftext|>\n", True, True, "two end tokens"),
    (RIGHT + "</s>", True, True, "the end token of Llama 2"),
    ("<|im_end|>" + RIGHT, False, True, "an end token in front"),
    (THINK + "<|im_end|><answer>18</answer>", False, True, "an end token between the blocks"),
    (THINK + "<answer>18<|im_end|>", False, False, "ended inside the answer"),
    (THINK + "\u2003\t\u3000<answer>18</answer>", True, True, "Unicode whitespace between the blocks"),
    (THINK + "\u200b<answer>18</answer>", False, True, "a zero-width space is not whitespace"),
    (THINK + ".<answer>18</answer>", False, True, "one full stop between the blocks"),
    ("```\n" + RIGHT + "\n```", False, True, "the whole in a code block"),
    ("\ufeff" + RIGHT, False, True, "a byte order mark in front"),
    ("<THINK>x</THINK><ANSWER>18</ANSWER>", False, False, "capitals"),
    ("<think >x</think><answer>18</answer>", False, True, "a space in the think tag"),
    ("<think>x</think><answer >18</answer>", False, False, "a space in the answer tag"),
    ("<think>x</think><answer>18</answer >", False, False, "a space in the closing tag"),
    ('<think>x</think><answer type="int">18</answer>', False, False, "an attribute"),
    ("<think>x</think><answer/>18", False, False, "a self-closing tag"),
    ("<thinking>x</thinking><answer>18</answer>", False, True, "another tag"),
    ("&lt;think&gt;x&lt;/think&gt;&lt;answer&gt;18&lt;/answer&gt;", False, False, "escaped tags"),
    ("[think]x[/think][answer]18[/answer]", False, False, "square brackets"),
    ("<think>x</think>18", False, False, "no answer block"),
    ("<answer>18</answer>", False, True, "no think block, one closed answer block"),
    ("<answer>18</answer><think>x", False, True, "no </think> at all"),
    ("<think>x<answer>18</answer></think>", False, False, "the answer inside the thinking"),
    ("<think>x<answer>20</answer></think><answer>18</answer>", False, True, "only what follows </think>"),
    ("<think>x<answer>18</answer></think><answer>20</answer>", False, False, "the same the other way round"),
    ("<answer>18</answer><think>x</think><answer>20</answer>", False, False, "only what follows </think>"),
    (RIGHT + "<think>again</think>", False, False, "nothing after the last </think>"),
    (RIGHT + "<think>again</think><answer>20</answer>", False, False, "the second round counts"),
    (THINK + "<answer>20</answer><think>x</think><answer>18</answer>", False, True, "the last round counts"),
    ("</think><answer>18</answer>", False, True, "only the closing think tag"),
    (RIGHT + "<answer>20", False, True, "a second block that is not closed is none"),
    (THINK + "<answer>20<answer>18</answer>", False, False, "an unclosed block in front of the closed one"),
    (THINK + "<answer>20<answer>18</answer></answer>", False, False, "a nested block beside another value"),
    (THINK + "<answer><answer>18</answer>20</answer>", False, False, "the same behind it"),
    (THINK + "<answer>18</answer>20<answer>18</answer>", False, True, "prose between two blocks that agree"),
    (THINK + "<answer>18</answer><answer>18.0</answer>", False, True, "blocks that agree in value"),
    (THINK + "<answer>18</answer><answer>-18</answer>", False, False, "blocks that differ in sign"),
    (THINK + "<answer>18</answer><answer>unknown</answer>", False, False, "the second names nothing"),
    (THINK + "<answer></answer><answer>18</answer>", False, True, "an empty block names nothing else"),
    (THINK + "<answer>18</answer></answer>", False, True, "a closing tag too many"),
    (THINK + "</answer>18<answer>", False, False, "tags the wrong way round"),
    (THINK + "<answer><think>18</think></answer>", False, False, "think inside answer"),
    (THINK + "".join(f"<answer>{n}</answer>" for n in range(40)), False, False, "every candidate in a block"),
    (THINK + "<answer>18</answer>" * 5, False, True, "the same value five times"),
    ("<think> \n\t</think><answer>18</answer>", False, True, "whitespace is no thinking"),
    ("<think>\u200b\u2060\ufeff</think><answer>18</answer>", False, True, "nor is what cannot be seen"),
    ("<think>\u3164\u2800</think><answer>18</answer>", False, True, "nor are letters that look blank"),
    ("<think>x</think><answer> \u200b </answer>", False, False, "an invisible answer"),
    ("<think>.</think><answer>18</answer>", True, True, "the shortest thinking is still some"),
    ("<think>a < b and </ b></think><answer>18</answer>", True, True, "angle brackets that are no tags"),
    ("<think>x</think><answer>eighteen</answer>", True, False, "well formed, no digits"),
    ("<think>18</think><answer>20</answer> 18 18", False, False, "the right number all around the block"),
    ("", False, False, "nothing"),
    (" \n", False, False, "whitespace"),
    ("18", False, False, "the number alone"),
    ("\x00\ud800\udfff" + RIGHT, False, True, "NUL and lone surrogates in front"),
]

# Greedy answers of SmolLM2-135M-Instruct, warm-started, to GSM8K test questions: the response, what its block names,
# and the question's gold.
SMOLLM2 = [
    (
        "<think>Billy sold 8 * 3 = 24 DVDs.\nHe sold 24 DVDs on Tuesday.</think><answer>24</answer>",
        "24",
        "7",
    ),
    (
        "<think>Gretchen has 110 coins - 30 = 60 gold coins.\nGretchen has 60 gold coins.</think><answ"
        "er>60</answer>",
        "60",
        "70",
    ),
    (
        "<think>Raphael spent $1.5 * 4 = $6.\nRaphael spent $6 * $4 = $24.\nSo Raphael spent $24.</thin"
        "k><answer>24</answer>",
        "24",
        "34",
    ),
    (
        "<think>Tom gets 4 car washes x $15 = $50 in a year.\nIn a year, Tom pays $50 x 12 = $600.</th"
        "ink><answer>600</answer>",
        "600",
        "720",
    ),
    (
        "<think>Cynthia buys 15 * 15 = 225 ice cream servings in 60 days.\nShe will spend 225 * 60 = 1"
        "2500 dollars on ice cream.</think><answer>12500</answer>",
        "12500",
        "16",
    ),
    (
        "<think>Carl buys 10 * 6 = 60 cookies.\nEach cookie cost $0.10.\nCarl pays with a $10 bill.\nCar"
        "l receives $10 * 60 = $600 change.</think><answer>600</answer>",
        "600",
        "4",
    ),
    (
        "<think>Jan has 3*4 = 12 pets\nCindy has 2*4 = 8 pets\nJan has 12 + 8 = 20 pets\nThe total numbe"
        "r of pets is 20 + 20 = 40 pets\nThe three have 40/3 = 12 pets</think><answer>12</answer>",
        "12",
        "28",
    ),
    (
        "<think>The Doubtfire family now has 7 + 12 = 20 kittens.\nThe Doubtfire sisters are now 20 - "
        "2 = 18 kittens.\nThe Doubtfire family now has 18 - 2 = 16 kittens.</think><answer>16</answer>",
        "16",
        "40",
    ),
    (
        "<think>The number of semi-automatic cars is 4/12 = 0.35.\nThe number of automatic cars is 12/"
        "12 = 1.\nThe percentage of semi-automatic cars is 0.35 * 100 = 35%.</think><answer>35</answer"
        ">",
        "35",
        "20",
    ),
    (
        "<think>She needs 16 * 2 = 32 gift bags to accommodate 16 friends.\nShe will need 32 * 16 = 54"
        "0 gift bags.\nShe will spend $540 / 32 = $16.\nShe will spend $16 * 1.75 = $22.50.</think><ans"
        "wer>22.50</answer>",
        "22.50",
        "24",
    ),
    (
        "<think>The total amount of money he will spend is 4 x 15 = 50 dollars.\nThe total amount of m"
        "oney he will spend is 50 - 50 = 0 dollars.\nThe total amount of money he will spend is 0 + 0 "
        "= 0 dollars.</think><answer>0</answer>",
        "0",
        "880",
    ),
    (
        "<think>There are 23786 * 9092 = 21944000 children in Soda.\nThere are 8417 * 9092 = 7544000 c"
        "hildren in the city of Soda.\nThere are 21944000 + 7544000 = 10298000 children in the city of"
        " Soda.</think><answer>10298000</answer>",
        "10298000",
        "6277",
    ),
    (
        "<think>Brian has 20 - 5 = 15 video games.\nBoy's friend Bobby has 15 - 5 = 10 video games.\nBr"
        'ian has 10 + 5 = 15 video games.\nBobby has 15 - 10 = 5 video games.\nBobby has 5 - 5 = 0 vide'
        'o games.\nThe answer is 5.</think><answer>5</answer>',
        '5',
        '40',
    ),
    (
        "<think>Juan and Carlos made 20 glasses of lemonade for each gallon.\nThey made 20 gallons of "
        "lemonade for each gallon.\nThey sold each glass for $0.50.\nThey spent $25 on lemons.\nSo, they"
        " spent $25 * 0.50 = $12.50 on lemons.</think><answer>12.50</answer>",
        "12.50",
        "15",
    ),
]
# The same model as it comes, and warm-started but cut off: response, gold, strict, lenient.
SMOLLM2_WITHOUT_FORMAT = [
    (
        'John has 13 lego sets and has 13 - 12 = 2 lego sets left.\n\nThe answer is: 2',
        '2',
        False,
        True,
    ),
    (
        "Cody eats 3 times as many cookies as Amir eats, so Cody eats 3 * Amir's eat. Amir eats 5 coo"
        'kies, so Cody eats 3 * 5 = 15 cookies.\nBoth Cody and Amir eat the same number of cookies tog'
        'ether, so they eat 15 + 3 = 20 cookies.\n#### 20\nThe answer is: 20',
        '20',
        False,
        True,
    ),
    (
        '<think>There are 500 - 500 - 3 * 1/4 = 500 - 1/4 = 450 pieces of legos.\nThere are 500 - 500 '
        '- 3 * 1/4 = 500 - 1/4 = 450 pieces of legos.\nThere are 500 - 500 - 3 * 1/4 = 500 - 1/4 = 450'
        ' pieces of legos.\nThere are 500 - 500 - 3 * 1/4 = 500 - 1/4 = 450 pieces of legos.\nThere are'
        ' 500 - 500 - 3 * 1/4 = 5',
        '2,125',
        False,
        False,
    ),
    (
        '<think>Janet pays $500 x 10% = $500 x 0.10 = $50\nShe pays $500 x 10 = $500\nShe pays 10% of t'
        'hat to get it insured = $500 x 0.10 = $50\nShe pays $500 x 10 = $500\nShe pays 10% of that to '
        'get it insured = $500 x 10 = $500\nShe pays $500 x 10 = $500\nShe pays $500 x 10 = $500\nShe pa'
        'ys $500 x 10 = $500\nShe ',
        '1430',
        False,
        False,
    ),
]


def wrap(body):
    return f"<think>x</think><answer>{body}</answer>"


def verdicts(response, gold):
    return check_format(response), check_answer(response, gold)


def timed(response, gold):
    start = time.perf_counter()
    return verdicts(response, gold), time.perf_counter() - start


@pytest.mark.skipif(not CASES.exists(), reason=f"no gathered cases at {CASES}")
def test_gathered_cases_in_main_and_worker_thread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").split("\n") if line]
    inputs = [(case["response"], case["gold"]) for case in cases]
    main = [timed(*pair) for pair in inputs]
    with ThreadPoolExecutor(1) as pool:
        worker = list(pool.map(lambda pair: timed(*pair), inputs))
    right = [(case["format_ok"], case["answer_ok"]) for case in cases]
    wrong = [case["id"] for case, (got, _), expected in zip(cases, main, right) if got != expected]
    assert (len(cases), wrong) == (86, [])
    assert [got for got, _ in worker] == [got for got, _ in main]
    assert max(seconds for _, seconds in main + worker) < 0.1
    assert list(tmp_path.iterdir()) == []  # the code in an answer did not run


@pytest.mark.parametrize("body, gold, right, why", BODIES)
def test_answer_bodies(body, gold, right, why):
    assert check_answer(wrap(body), gold) is right, why


@pytest.mark.parametrize("response, format_ok, answer_ok, why", RESPONSES)
def test_responses(response, format_ok, answer_ok, why):
    assert verdicts(response, "18") == (format_ok, answer_ok), why


@pytest.mark.parametrize("response, named, gold", SMOLLM2)
def test_real_answers_in_the_format(response, named, gold):
    assert check_format(response) and check_answer(response, named) and check_answer_lenient(response, named)
    assert check_answer(response, gold) is False


@pytest.mark.parametrize("response, gold, strict, lenient", SMOLLM2_WITHOUT_FORMAT)
def test_real_answers_without_the_format(response, gold, strict, lenient):
    assert not check_format(response) and reward_function(response, gold)["format"] == 0
    assert (check_answer(response, gold), check_answer_lenient(response, gold)) == (strict, lenient)


def test_rewards_add_up():
    assert reward_function(RIGHT, "18") == {"reward": 2.25, "format": 1.25, "answer": 1.0}
    assert reward_function(RIGHT, "20") == {"reward": 1.25, "format": 1.25, "answer": 0.0}
    assert reward_function("<answer>18</answer>", "18") == {"reward": 1.0, "format": 0.0, "answer": 1.0}
    assert reward_function("18", "18") == {"reward": 0.0, "format": 0.0, "answer": 0.0}


@pytest.mark.parametrize("response, gold, right", [
    ("She makes 18 dollars. The answer is 18.", "18", True),
    ("It is 20, no, 18!", "18", True),
    ("It is 18, no, 20", "18", False),
    ("#### 1,080", "1080", True),
    ("The answer is $1,080.00 a day", "1,080", True),
    ("\\boxed{-18}", "-18", True),
    ("9 - 27 = -18", "18", False),
    ("x" * 1000 + " 18 " + "y" * 100_000, "18", True),
    ("118", "18", False),
    ("1" * 6000, "1" * 11, False),
    ("no number", "0", False),
    ("<answer>Paris</answer>", "Paris", True),
    ("", "18", False),
])
def test_lenient(response, gold, right):
    assert check_answer_lenient(response, gold) is right


def assert_legal(response, gold):
    result = reward_function(response, gold)
    assert set(result) == {"reward", "format", "answer"}
    assert result["format"] in (0.0, FORMAT_REWARD) and result["answer"] in (0.0, ANSWER_REWARD)
    assert result["reward"] == result["format"] + result["answer"]
    assert check_answer_lenient(response, gold) in (True, False)


ANY = st.text(st.characters(), max_size=60) | st.text(max_size=60)  # characters() includes surrogates
PIECES = st.sampled_from([
    "<think>", "</think>", "<answer>", "</answer>", "<Answer>", "<|im_end|>", "18", "-18", "20", "1,000",
    "1 000", ",", ".", ".5", "-", "\u2212", "+", "*", "**", "/", "^", "=", "$", "\\frac{36}{2}", "\\frac{",
    "{", "}", "\\boxed{", "\\text{", "%", ":", "9:00", "(", ")", " or ", " and ", "k", "million", "e9", "E99",
    "1e999999", "9" * 60, "\u00bd", "\u00b2", "\u2044", "\u200b", "\u0661", "\uff11", "\ud800", "\0", "\n",
    " ", "_", "`", "#", "<", ">", "0", "/0", "__import__('os')", "x",
])
BUILT = st.lists(PIECES, max_size=25).map("".join)


@settings(max_examples=300, deadline=None)
@given(ANY | BUILT | ANY.map(wrap) | BUILT.map(wrap), ANY | BUILT)
def test_any_input_gets_a_legal_reward(response, gold):
    assert_legal(response, gold)


@settings(max_examples=200, deadline=None)
@given(st.integers(-10**12, 10**12), st.integers(-10**12, 10**12))
def test_only_the_same_integer_is_right(a, b):
    for body in (str(a), f"{a:,}", f"${a:,}.00", f"**{a}** eggs", f"The answer is {a}."):
        assert check_answer(wrap(body), str(a))
        assert check_answer(wrap(body), f"{b:,}") is (a == b)
        assert check_answer(wrap(f"{body} or {b}"), str(a)) is (a == b)


@settings(max_examples=200, deadline=None)
@given(BUILT, BUILT)
def test_no_answer_is_right_for_two_golds(response, thinking):
    response = f"<think>{thinking}</think>{response}"
    golds = ("18", "-18", "20", "1000", "0", "9", "2.5", "0.5")
    assert sum(check_answer(response, gold) for gold in golds) <= 1


AUDITED = {"on": False, "events": []}
FORBIDDEN = ("exec", "compile", "import", "open", "os.system", "subprocess.Popen", "socket.connect")


def audit(event, args):
    if AUDITED["on"] and event in FORBIDDEN:
        AUDITED["events"].append((event, args))


def test_nothing_is_evaluated():
    bodies = ["9 * 2", "9**9**9", "sum([9, 9])", "__import__('os').getpid()", "open('x','w')",
              "exec('x=9+9')", "1e999999999", "import this", "{18}.pop()", "$(echo 18)"]
    responses = [wrap(body) for body in bodies]
    verdicts(RIGHT, "18")  # fills the cache of compiled patterns
    sys.addaudithook(audit)
    AUDITED["on"] = True
    got = [(check_answer(response, "18"), check_answer_lenient(response, "0")) for response in responses]
    AUDITED["on"] = False
    assert AUDITED["events"] == []
    assert got[:7] == [(False, False)] * 7


UNITS = [
    "<think>", "</think>", "<answer>", "</answer>", "<answer>18</answer>", "<answer></answer>", "<", "</",
    "<think", "1", "1,", "18 ", "1,000", "9**", "-", " ", "\n", "\t<", "\\frac{", "{", "(", "*", "_ ", "**a",
    "$", "or ", "<|im_end|>", "\u200b", "\u00bd", "\ufdfa", "\u0661", "=", "1/", "1 000 ", "e9", "a",
    "\ud800", "\0",
]


def hostile(unit, size):
    text = unit * (size // len(unit))
    return [text, wrap(text), f"<think>{text}</think><answer>18</answer>", RIGHT + text, f"<answer>{text}",
            f"<think>x</think>{text}<answer>18</answer>{text}"]


@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_at_most_linearly_to_a_megabyte(unit):
    def seconds(size):
        responses = hostile(unit, size)
        start = time.process_time()
        for response in responses:
            reward_function(response, "18")
            check_answer_lenient(response, "18")
        return time.process_time() - start

    small, large = seconds(250_000), seconds(1_000_000)
    assert large < 3.0  # six responses, each read twice
    assert large < 10 * small + 0.2  # four times the length; quadratic growth would be 16 times the work


@pytest.mark.parametrize("unit", [
    "<", "*", "_a ", "\\frac{1}{", "1 000 ", "18, ", "or ", "-1", "(", "=1", "9 * ", "1/2 ",
    "\ufdfa", "\u00bd", "$1 m", "minus ", "18k", "\n", "1" * 50 + " ", "and a ", "18 k k ", "18\n", "not a ",
    "half ", "(=",
])
def test_longest_answer_bodies_are_fast(unit):
    (_, seconds) = timed(wrap((unit * 500)[:500]), "18")
    assert seconds < 0.1


@pytest.fixture(scope="module")
def golds():
    if not GSM8K.exists():
        pytest.skip(f"no GSM8K at {GSM8K}")
    rows = [json.loads(line) for split in ("train", "test")
            for line in (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").split("\n") if line]
    return [row["answer"].split("\n")[-1].removeprefix("#### ") for row in rows]


def test_real_golds_parse_and_equal_themselves(golds):
    assert len(golds) == 8792
    for gold in set(golds):
        assert gold_value(gold) == Fraction(gold.replace(",", ""))
        assert reward_function(f"<think>x</think><answer>{gold}</answer>", gold)["reward"] == 2.25
        assert check_answer_lenient(f"So #### {gold}", gold)


def test_different_real_golds_are_never_equal(golds):
    rng, pairs = random.Random(0), 0
    while pairs < 5000:
        a, b = rng.choice(golds), rng.choice(golds)
        if int(a.replace(",", "")) != int(b.replace(",", "")):
            pairs += 1
            assert not check_answer(wrap(a), b) and not check_answer_lenient(wrap(a), b)
