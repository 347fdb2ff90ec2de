"""Beats that many plots of the small world share.  `plots.py` explains beats and the fields in braces."""

OPENING = [
    "Once upon a time, {ah} lived {at}.",
    "Once upon a time there was {ah} who lived {at}.",
    "Long ago, {ah} lived {at}.",
    "There once was {ah} who lived {at}.",
    "Once there was {ah}. {They} lived {at}.",
    "In a small house {at} lived {ah}.",
    "Far away, {at}, there lived {ah}.",
]

WEATHER = [
    None,
    "It was a warm and sunny day.",
    "The wind was blowing and the leaves were falling.",
    "A soft rain had fallen in the night.",
    "The sky was clear and the birds were singing.",
    "Snow lay on the ground and the air was cold.",
    "The sun had just come up.",
]

OWNED = [
    "{They} had {alo} that {they} loved more than anything else.",
    "{Their} dearest thing was {alo}.",
    "Every day {they} carried {alo} wherever {they} went.",
    "{Their} grandmother had given {them} {alo}, and {they} took good care of it.",
    "On a shelf in {their} room {they} kept {alo}.",
]

ENDING = [
    "From that day on, {h} and {k} were the best of friends.",
    "And {h} and {k} were friends for the rest of their lives.",
    "That night {h} slept well, and {they} dreamed of {k}.",
    "And {h} never forgot how {k} had helped {them}.",
    "Since then {h} and {k} have met every day {at}.",
    "And that is how {h} and {k} became friends.",
]

LESSON = [
    None,
    "{H} had learned that a friend is worth more than any treasure.",
    "{H} had learned that it is good to ask for help.",
    "And {they} knew that kindness always comes back.",
    "{H} was tired, but very happy.",
    "It had been a long day, and a good one.",
]

TROUBLE = {
    "light": (
        [
            "There, a dark tunnel lay before them, and nobody could see the way.",
            "Suddenly it became so dark that they could not see their own feet.",
        ],
        ["The light filled the dark, and they could go on."],
    ),
    "sound": (
        ["A thick fog came up, and nobody could find them.", "They were lost, and no one knew where they were."],
        ["The sound was heard far away, and soon people came to bring them home."],
    ),
    "warm": (
        ["An icy wind came up, and {k} began to shiver.", "It began to snow, and {k} was terribly cold."],
        ["They both sat under it, and soon they were warm again."],
    ),
    "food": (
        ["They walked for so long that {k} grew weak from hunger.", "They had nothing to eat, and {k} was hungry."],
        ["They shared it and felt strong again."],
    ),
    "climb": (
        ["Suddenly {k} slipped and fell into a deep hole.", "Then the ground broke, and {k} fell into a pit."],
        ["So {k} could climb out again."],
    ),
    "guide": (
        [
            "Then they came to a place where three paths met, and they did not know which one to take.",
            "After a while they no longer knew where they were.",
        ],
        ["Now {they} knew which way was the right one."],
    ),
    "rain": (
        ["Suddenly a great storm came, and the rain poured down.", "Dark clouds came, and it began to rain hard."],
        ["Under it they stayed dry until the storm was over."],
    ),
}
"""For each use of a thing: sentences about the trouble that it helps against, and sentences about the rescue."""
