"""The plots of the small world: the events of a story, beat by beat.

This is data for `world.Teller`.  A plot is a list of beats.  A beat is a list of sentences with the same content, of
which the teller chooses one.  If it chooses None, the beat is left out.

Fields in braces: h is the hero (H at the start of a sentence, ah at the first mention), k the helper, x a third role.
Pronouns (they, them, their, self) are only for the hero and have the hero's gender.  o is the thing (ao with its
article, alo and lo with an adjective).  at, to and p are the home, and at2, to2, p2, at3, p3 other places.
"""

from .beats import ENDING, LESSON, OPENING, OWNED, WEATHER

LOST = [
    OPENING,
    OWNED,
    [
        "{When}, {they} woke up and the {o} was gone.",
        "{When}, {h} could not find the {o} anywhere.",
        "{When}, {they} looked for the {o}, but it was not there.",
        "{When}, when {they} came home from {p2}, the {o} was missing.",
    ],
    [
        "{H} looked under the bed and behind the door, but there was no {o}.",
        "{H} searched the whole house and found only dust.",
        "{They} looked everywhere, and then {they} began to cry.",
        '"Where can it be?" said {h}, and {they} went out to look for it.',
    ],
    [
        "First {they} went {to3} and asked {ax}, but {x} had not seen it.",
        '{At3} {they} met {ax}. "Have you seen my {o}?" asked {h}. "No," said {x}, "I have not."',
        "{They} asked {ax} {at3}, but {x} only shook a sad head.",
    ],
    ["Then {h} met {ak}.", "A little later {they} came upon {ak}.", "On the way home {they} saw {ak}."],
    [
        '"I saw {ao} {at2}," said {k}. "Come, I will show you the way."',
        '"Do not cry," said {k}. "I think your {o} is {at2}. Let us go there together."',
        '{K} thought for a while and said, "Something was lying {at2} this morning. It may be your {o}."',
    ],
    [
        "The way was long, and {h} grew tired, but {k} walked beside {them}.",
        "They walked until the sun went down.",
        "Together they walked over the fields.",
        None,
    ],
    [
        "And there it was! The {o} was lying {at2}.",
        "{At2}, under a bush, they found the {o}.",
        "{At2} they looked between the stones, and there lay the {o}.",
    ],
    [
        "{H} was so glad that {they} danced.",
        '"Thank you!" said {h}, and {they} gave {k} a hug.',
        "{H} picked up the {o} and held it tight.",
        '"My {o}!" cried {h}. "Thank you, {k}!"',
    ],
    LESSON,
    ENDING,
]

FOUND = [
    OPENING,
    WEATHER,
    [
        "{When}, {h} was walking {at2} and saw {ao} on the ground.",
        "{When}, {they} found {alo} {at2}.",
        "{When}, {h} went {to2}, and there lay {alo}.",
    ],
    [
        '"Whose {o} is this?" said {h}.',
        '"What a {lo}!" said {h}. "Someone must miss it."',
        "{H} wanted to keep it, but {they} knew that it belonged to someone else.",
        "{H} picked it up and wondered who had lost it.",
    ],
    [
        '{They} met {ax}. "Is this your {o}?" asked {h}. "No," said {x}, "it is not mine."',
        "First {they} asked {ax}, but {x} had never seen the {o} before.",
        "{They} showed the {o} to {ax}, but {x} did not know whose it was.",
    ],
    [
        "Then {h} went {to3}, where {ak} was sitting and crying.",
        "{At3} {they} found {ak}, who looked very sad.",
        "At last {they} heard a sad voice {at3}. It was {ak}.",
    ],
    [
        '"What is wrong?" asked {h}. "I have lost my {o}," said {k}.',
        '"I have looked for my {o} all day," said {k}. "I will never find it."',
        '"Why are you so sad?" asked {h}. {K} said, "My {o} is gone."',
    ],
    [
        '"Here it is!" said {h}, and {they} gave the {o} back.',
        "{H} smiled and held out the {o}.",
        "Without a word {h} put the {o} down in front of {k}.",
    ],
    [
        "{K} laughed with joy and asked {h} to stay for supper.",
        '"You are a true friend," said {k}.',
        "{K} was so happy that the tears dried at once.",
        "{K} thanked {h} again and again.",
    ],
    LESSON,
    ENDING,
]

DELIVERY = [
    OPENING,
    [
        '{When}, {ax} came to {them} and said, "Please bring this {o} to {k} {at3}."',
        '{When}, {ax} gave {them} {alo} and said, "This is for {k}, who lives {at3}. Will you take it there?"',
        "{When}, {h} had to carry {alo} to {k}, who lived {at3}.",
    ],
    [
        '"I will do it," said {h}, and {they} set out at once.',
        "{H} put the {o} into a bag and set out.",
        "{H} was a little afraid, but {they} said yes.",
    ],
    WEATHER,
    [
        "When {they} came {to2}, {they} lost the way.",
        "{At2} {they} took a wrong turn and got lost.",
        "Soon the path ended {at2}, and {h} did not know where to go.",
        "{At2} it grew dark, and {h} could not see the path.",
    ],
    [
        "{They} sat down and thought. Then {they} saw smoke in the distance and walked toward it.",
        "{They} waited until the moon came up. Then {they} could see the path again.",
        "A bird showed {them} the way, flying from tree to tree.",
        "{They} followed a little stream, because water always knows the way.",
    ],
    [
        "On the last part of the way {they} was hungry and cold, but {they} did not give up.",
        "{They} walked and walked, and {they} held the {o} tight.",
        None,
    ],
    [
        "At last {they} came {to3} and knocked at the door.",
        "In the evening {h} reached {p3}.",
        "When the sun went down, {they} saw the house of {k} {at3}.",
    ],
    ["There stood {ak}.", "The door opened, and out came {ak}.", "{ak} opened the door."],
    [
        '"I have brought you {ao}," said {h}.',
        '"This {o} is for you," said {h}.',
        "{H} took the {o} out of the bag and gave it to {k}.",
    ],
    [
        '"I have waited for it so long," said {k}. "Come in and rest."',
        "{K} was very glad and gave {h} warm soup and a soft bed.",
        '"You came all this way!" said {k}. "How brave you are."',
    ],
    LESSON,
    ENDING,
]

GIFT = [
    OPENING,
    [
        "{Their} best friend was {ak}.",
        "Next door lived {ak}, and the two were friends.",
        "{They} had one good friend, {ak}.",
    ],
    [
        "Soon it would be the birthday of {k}, and {h} wanted to give {k} {ao}.",
        "{When}, {h} heard that {k} wished for {ao} more than for anything else.",
        "{K} had always wanted {ao}, and {h} knew it.",
    ],
    [
        "But {ao} cost ten coins, and {h} had only two.",
        "But {h} had no money at all.",
        "But nobody {at} had {ao} to sell.",
    ],
    [
        "So {they} went {to2} and worked for {ax}.",
        "So {h} asked {ax} for work {at2}.",
        "So {they} went {to2}, where {ax} needed help.",
    ],
    [
        "{They} swept the floor and carried water for seven days.",
        "All week {they} carried wood and never complained.",
        "{They} worked hard from morning until night.",
    ],
    [
        'In the end {x} said, "You have worked well. Take this {o}."',
        "{X} was pleased and gave {them} {alo}.",
        'At the end of the week {x} smiled and said, "This {o} is for you. You have earned it."',
    ],
    [
        "{H} ran home and put the {o} before the door of {k}.",
        "{H} tied a ribbon around the {o} and went to {k}.",
        "The next day {they} brought the {o} to {k}.",
    ],
    [
        "When {k} saw the {o}, there was great joy.",
        '"For me?" cried {k}. "It is the best gift in the world!"',
        "{K} could not believe it and jumped up and down.",
        '"Oh!" cried {k}. "How did you know?"',
    ],
    LESSON,
    ENDING,
]

QUARREL = [
    OPENING,
    ["{Their} neighbor was {ak}.", "Near {them} lived {ak}.", "Not far away lived {ak}."],
    [
        "{When}, {h} and {k} found {alo} {at2}.",
        "{When}, the two went {to2} and saw {alo} at the same time.",
        "{When}, {h} and {k} saw {alo} lying {at2}.",
    ],
    [
        '"It is mine!" said {h}. "No, it is mine!" said {k}.',
        "Both of them wanted the {o}, and they began to quarrel.",
        '"I saw the {o} first," said {h}. "But I touched it first," said {k}.',
    ],
    [
        "They pulled and pulled, and the {o} fell into the mud.",
        "They shouted so loudly that the birds flew away.",
        "They did not speak to each other for three days.",
    ],
    [
        "Then {ax} came by and asked what was wrong.",
        "{ax} had heard them and came closer.",
        "At last they went to {ax} and asked who was right.",
    ],
    [
        '"Why do you not share it?" asked {x}. "One day for you, and one day for you."',
        '"A thing is small," said {x}, "but a friend is big."',
        '{X} laughed. "If you share the {o}, both of you will have it."',
    ],
    [
        "{H} looked at the ground. {They} was sorry.",
        '"I am sorry," said {h}. "I am sorry too," said {k}.',
        "{H} thought about it, and then {they} held out a hand to {k}.",
    ],
    [
        "So they shared the {o}, and it was much more fun.",
        "After that, they shared the {o} every day.",
        "They cleaned the {o} and put it {at2}, so that everyone could use it.",
    ],
    LESSON,
    ENDING,
]

TRADE = [
    OPENING,
    [
        "More than anything, {they} wanted {ao}.",
        "{They} had dreamed of {ao} all winter.",
        "{They} wished for {ao}, but {they} had only {ay}.",
    ],
    ["{When}, {they} took {ay} and went {to2}.", "{When}, {they} packed {ay} and walked {to2}."],
    [
        'There {they} met {ax}. "I need {ay}," said {x}. "I will give you {az} for it."',
        "{ax} was there and offered {them} {az} for the {y}.",
        '{At2} {ax} looked at the {y} and said, "I will trade you {az} for that."',
    ],
    [
        "{H} agreed, and now {they} had {az}.",
        "So {h} gave away the {y} and took the {z}.",
        "{They} made the trade and went on with the {z}.",
    ],
    ["{At3} {they} met {ak}.", "Then {h} went {to3} and saw {ak}.", "A while later {ak} came along {at3}."],
    [
        '"What a fine {z}!" said {k}. "I have {ao} at home. Would you like to trade?"',
        '{K} had {ao} and no {z}. "Let us trade," said {k}.',
        '"I have looked for {az} for years," said {k}. "Take this {o} for it."',
    ],
    ["{H} could hardly believe it.", '"Yes, please!" said {h}.', "{H} nodded, and {their} heart beat fast."],
    [
        "So in the end {they} had {ao}, and {k} had {az}, and both were happy.",
        "That is how {h} got the {o}, with nothing but {ay} to begin with.",
        "{H} carried the {o} home and showed it to everyone.",
    ],
    LESSON,
    ENDING,
]

FEAR = [
    OPENING,
    [
        "{When}, in the middle of the night, {they} heard a strange noise.",
        "{When}, a strange sound came from {p2}.",
        "{When}, {they} heard something go tap, tap, tap outside.",
    ],
    [
        '"What is that?" whispered {h}.',
        "{H} was afraid and pulled the blanket over {their} head.",
        "{Their} heart beat loudly.",
    ],
    [
        "But {they} was also curious. {They} took {ao} and went to see.",
        "Then {they} took {their} {o}, because it made {them} feel brave, and opened the door.",
        "{They} wanted to be brave, so {they} picked up {ao} and went outside.",
    ],
    [
        "The noise came from {p2}, and it grew louder and louder.",
        "Step by step, {h} went {to2}.",
        "{They} followed the sound until {they} stood {at2}.",
    ],
    [
        "There, behind a stone, sat {ak}.",
        "And what did {they} see? It was only {ak}.",
        "There was no monster at all. It was {ak}.",
    ],
    [
        '"I am cold and I have no home," said {k}.',
        '"I have lost my way," said {k}. "Please do not be afraid of me."',
        '"I was afraid of you," said {k}.',
        '"I only wanted someone to talk to," said {k}.',
    ],
    [
        "{H} laughed and put the {o} down. {They} was not afraid any more.",
        '"You can come with me," said {h}.',
        '"And I was afraid of you!" said {h}, and both of them laughed.',
    ],
    [
        "{H} gave {k} the {o} as a gift.",
        "They went home together and drank warm milk.",
        "They sat beside the fire and told stories until morning.",
    ],
    LESSON,
    ENDING,
]

LEARN = [
    OPENING,
    [
        "{They} had {alo}, but {they} did not know how to {skill} it.",
        "{When}, {they} got {alo}, but {they} could not {skill} it.",
    ],
    [
        "{They} tried and tried, but it went wrong every time.",
        "{H} tried it for a whole day, and everyone laughed.",
        "The first time {they} tried, {they} fell over.",
    ],
    [
        '"I will never learn it," said {h}, and {they} threw the {o} into a corner.',
        "{H} was sad and wanted to give up.",
        "{They} sat down {at2} and cried.",
    ],
    ["Then {ak} came along.", "{ak} saw {them} there.", "But {ak} had watched {them}."],
    [
        '"I can show you how to {skill} {ao}," said {k}. "You must be patient."',
        '"Nobody can do it on the first day," said {k}. "Let us try it together."',
        '{K} took the {o} and said, "Look, this is how you {skill} it."',
    ],
    [
        "Every evening they met {at2} and practiced.",
        "They practiced for seven days.",
        "Day after day {k} helped {them}, and day after day it went better.",
    ],
    ["Then came the day of the great feast {at3}.", "One day there was a feast {at3}, and everyone was there."],
    ["{H} took the {o} and showed what {they} could do.", "{H} was nervous, but {they} took the {o} and began."],
    [
        "Everyone clapped, and {k} clapped the loudest.",
        "It went so well that nobody laughed any more.",
        '"Bravo!" cried all the people, and {k} was proud.',
    ],
    LESSON,
    ENDING,
]

TOOL = [
    OPENING,
    OWNED,
    [
        "{When}, {they} went {to2} together with {ak}.",
        "{When}, {ak} asked {them} to come along {to2}.",
        "{When}, {they} met {ak}, and they went {to2} together.",
    ],
    WEATHER,
    ["{trouble}"],
    ['"What shall we do?" cried {k}.', '"Now we are in trouble," said {k}.', '"Help!" cried {k}.', None],
    [
        '"I have an idea," said {h}.',
        '"Wait," said {h}, "I have my {o}."',
        "Then {h} thought of the {o}.",
        '"Do not be afraid," said {h}. "I have {ao} with me."',
    ],
    ["{H} {use}.", "Quickly {they} {use}.", "With careful hands {h} {use}."],
    ["{rescue}"],
    ['"You saved us!" said {k}.', '"What would I do without you?" said {k}.', '"How clever you are!" said {k}.'],
    ["When they came home, everyone wanted to hear about it.", "In the evening they were safe at home again.", None],
    LESSON,
    ENDING,
]

PLOTS = {
    "lost": LOST,
    "found": FOUND,
    "delivery": DELIVERY,
    "gift": GIFT,
    "quarrel": QUARREL,
    "trade": TRADE,
    "fear": FEAR,
    "learn": LEARN,
    "tool": TOOL,
}
