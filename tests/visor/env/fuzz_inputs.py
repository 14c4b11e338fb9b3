"""Random inputs for the fuzz tests. Input `index` of a kind comes from a generator of its own, so that a
failing one is made again alone: `reply(generator("parser", 123))`."""

import random

Size = tuple[int, int]

TAGS = [f"<{slash}{name}>" for name in ("think", "search", "bbox", "answer") for slash in ("", "/")]
BROKEN = [
    "<",
    ">",
    "</",
    "<think",
    "think>",
    "<think/>",
    "<THINK>",
    "< think>",
    "<bbox >",
    "</bbox",
    "<\x00think>",
]
MARKERS = ["<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "<|image_pad|>", "<|vision_start|>"]
NUMBERS = [
    "0", "1", "-1", "27", "28", "500", "999", "1000", "1001", "999999", "9999999", "1e9", "1e308",
    "1e999", "-0", "nan", "inf", "-inf", "NaN", "Infinity", "0.5", ".5", "5.", ".", "+3", "--3", "0x10",
    "1_000", "9" * 400, "0." + "0" * 300 + "1", "١٢٣", "१२", "１２３", "²", "½", "Ⅷ", "", " ", "None", "1,5",
]  # fmt: skip
TEXTS = [
    "ships", "the answer is ready, verify it", "我需要确认答案", "&amp;", "&#60;search&#62;",
    "&#9999999;", "&#x110000;",
    "&", "\ud800", "\udfff", "\x00", "\u2028", "\ufeff", "é" * 40, "e\u0301", "👩‍👩‍👧", "‮rtl", "{question}",
    "{thought}", "%s", "\\", "\r\n", "\t", "[", "]", "(((", "a" * 3000, "#page=", "<image>",
]  # fmt: skip
EXTREMES = [0.0, 0.49, 0.5, 1.0, 27.9, 999.5, 1000.0, 1001.0, -1.0, 1e6, -1e6, 1e308, -1e308, 5e-324,
            float("inf"), float("-inf"), float("nan")]  # fmt: skip
SIDES = [1, 2, 13, 14, 27, 28, 29, 55, 56, 57, 199, 200, 201, 5600, 5601, 20_000]


def generator(kind: str, index: int) -> random.Random:
    return random.Random(f"{kind} {index}")


def reply(rng: random.Random) -> str:
    """A reply: mostly pieces of the grammar in any order, else noise, else a well-formed turn."""
    draw = rng.random()
    if draw < 0.15:
        return rng.randbytes(rng.randint(0, 300)).decode(rng.choice(["latin-1", "utf-8"]), "replace")
    if draw < 0.25:
        return "".join(chr(rng.randint(0, 0x10FFFF)) for _ in range(rng.randint(0, 60)))
    if draw < 0.30:
        return rng.choice(TAGS) * rng.randint(1, 300)
    if draw < 0.60:
        return turn_reply(rng)
    return "".join(_piece(rng) for _ in range(rng.randint(0, 25)))


def turn_reply(rng: random.Random) -> str:
    """A reply that keeps to the grammar, but for now and then one character that is lost or doubled."""
    kind = rng.choice(["search", "search", "bbox", "bbox", "bbox", "answer"])
    content = box_text(rng) if kind == "bbox" else rng.choice(TEXTS)
    text = f"<think>{rng.choice(TEXTS)}</think>\n<{kind}>{content}</{kind}>"
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", text[at] * 2, "<", _piece(rng)]) + text[at + 1 :]
    return text


def box_text(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return "[" + ",".join(str(rng.randint(0, 1000)) for _ in range(4)) + "]"
    numbers = [rng.choice(NUMBERS) for _ in range(rng.choice([0, 3, 4, 4, 4, 4, 5, 50]))]
    return rng.choice("[[[[(") + rng.choice([",", ", ", ";", "，"]).join(numbers) + rng.choice("]]]])")


def _piece(rng: random.Random) -> str:
    pool = rng.choice([TAGS, TAGS, TAGS, BROKEN, MARKERS, TEXTS, NUMBERS, None])
    return box_text(rng) if pool is None else rng.choice(pool)


def box(rng: random.Random, limits: Size) -> tuple[float, float, float, float]:
    """A box about a space of `limits` units: inside, thin, reversed, beyond it, or of extreme numbers."""
    width, height = limits
    draw = rng.random()
    if draw < 0.4:
        values = [
            rng.uniform(0, width),
            rng.uniform(0, height),
            rng.uniform(0, width),
            rng.uniform(0, height),
        ]
    elif draw < 0.6:  # thin, or under one pixel
        x, y = rng.uniform(-5, width + 5), rng.uniform(-5, height + 5)
        values = [x, y, x + rng.choice([0, 0.99, 1, 1.01, width]), y + rng.choice([0, 0.99, 1, 1.01, height])]
    elif draw < 0.8:  # across the edges, or outside
        values = [rng.uniform(-3 * side, 4 * side) for side in (width, height, width, height)]
    else:
        values = [rng.choice(EXTREMES) for _ in range(4)]
    return values[0], values[1], values[2], values[3]


def side(rng: random.Random) -> int:
    return rng.choice(SIDES) if rng.random() < 0.3 else round(2 ** rng.uniform(0, 14.3))


def budget(rng: random.Random) -> tuple[int, int]:
    """(min_pixels, max_pixels), in order, both at least one image token."""
    low = 784 * round(2 ** rng.uniform(0, 10))
    return low, round(low * 2 ** rng.uniform(0, 6))
