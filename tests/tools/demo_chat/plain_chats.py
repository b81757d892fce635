"""Chats that need no tool: greetings, a few facts, small sums, and texts to copy."""

from tests.tools.demo_chat.tasks import Task
from tests.tools.demo_chat.values import Values, listed

CAPITALS = dict(
    pair.split(":")
    for pair in listed(
        "France:Paris,Italy:Rome,Germany:Berlin,Spain:Madrid,Portugal:Lisbon,Austria:Vienna,"
        "Norway:Oslo,Ireland:Dublin,Greece:Athens,Poland:Warsaw,England:London,Japan:Tokyo,"
        "Egypt:Cairo,Peru:Lima,India:Delhi,Vietnam:Hanoi,Kenya:Nairobi,Canada:Ottawa,Cuba:Havana,"
        "Australia:Canberra,China:Beijing,Russia:Moscow,Turkey:Ankara,Sweden:Stockholm,"
        "Denmark:Copenhagen,Finland:Helsinki,Hungary:Budapest,Belgium:Brussels,Chile:Santiago,"
        "Thailand:Bangkok"
    )
)
COLOURS = dict(
    pair.split(":")
    for pair in listed(
        "the sky:blue,grass:green,snow:white,coal:black,a banana:yellow,a lemon:yellow,"
        "a tomato:red,blood:red,the sun:yellow,an orange:orange,a carrot:orange,milk:white,"
        "chocolate:brown,the sea:blue,a frog:green,a strawberry:red,a swan:white,a raven:black"
    )
)
OPPOSITES = dict(
    pair.split(":")
    for pair in listed(
        "hot:cold,big:small,fast:slow,old:young,high:low,day:night,open:closed,good:bad,up:down,"
        "left:right,wet:dry,long:short,early:late,full:empty,hard:soft,light:dark,happy:sad"
    )
)
SMALL_TALK = (
    (
        "Hello!|Hello|Hi|Hi!|Hey|hello|hi there|Good morning!|Good evening|Good day",
        "Hello! How can I help you?",
        "The user greets me.",
    ),
    (
        "Who are you?|What are you?|who are you|Are you a robot?|Introduce yourself.|"
        "What is your name?|What's your name?|Are you human?|Which model are you?",
        "I am the demo assistant of Troika, a very small language model.",
        "The user asks who I am.",
    ),
    (
        "What can you do?|What can you do for me?|help|Help!|How can you help me?",
        "I can chat a little, add small numbers, name some capitals, and call your tools.",
        "The user asks what I can do.",
    ),
    (
        "How are you?|how are you|How are you today?|How do you do?|Are you well?",
        "I am fine, thank you. How can I help you?",
        "The user asks how I am.",
    ),
    (
        "Thank you!|Thanks|thanks!|Thank you very much.|Great, thanks!|thank you",
        "You are welcome!",
        "The user thanks me.",
    ),
    (
        "Bye|Goodbye!|See you!|bye bye|Good night!|See you later.|Goodbye",
        "Goodbye!",
        "The user leaves.",
    ),
    (
        "What is Troika?|what is troika|Explain Troika.|What does Troika do?",
        "Troika serves language models in separate processes, which survive each other.",
        "The user asks about Troika.",
    ),
)
UNKNOWN = (
    "Who won the {} cup?|Explain {}.|What is {}?|Write a poem about {}.|Why is {} so {}?|"
    "How do I cook {}?|Who wrote {}?|What do you think about {}?|When was {} born?|"
    "How many {} are there?|Describe {} to me.|What does {} mean?"
)


def small_talk(values: Values) -> Task:
    questions, answer, thought = values.pick(SMALL_TALK)
    return Task(values.form(questions), [], [], answer, thought, "talk")


def capital(values: Values) -> Task:
    forms = (
        "What is the capital of {}?|What's the capital of {}?|Name the capital of {}.|"
        "capital of {}|Which city is the capital of {}?|Do you know the capital of {}?"
    )
    thought = "The user asks for the capital of {}."
    if values.chance(0.12):
        country = values.name()
        answer = f"I do not know the capital of {country}."
    else:
        country = values.pick([*CAPITALS])
        answer = f"The capital of {country} is {CAPITALS[country]}."
    question = values.form(forms).format(country)
    return Task(question, [], [], answer, thought.format(country), "capital")


def colour(values: Values) -> Task:
    forms = "What colour is {}?|What color is {}?|Which colour has {}?|What is the colour of {}?"
    thing = values.pick([*COLOURS])
    question = values.form(forms).format(thing)
    answer = f"{thing.capitalize()} is {COLOURS[thing]}."
    return Task(question, [], [], answer, f"The user asks for the colour of {thing}.", "colour")


def opposite(values: Values) -> Task:
    forms = "What is the opposite of {}?|Opposite of {}?|Give me the opposite of {}."
    word = values.pick([*OPPOSITES])
    question = values.form(forms).format(word)
    answer = f"The opposite of {word} is {OPPOSITES[word]}."
    return Task(question, [], [], answer, f"The user asks for the opposite of {word}.", "opposite")


def small_sum(values: Values) -> Task:
    a, b = values.number(0, 12), values.number(0, 12)
    word, sign, result = values.pick(
        (("plus", "+", a + b), ("plus", "+", a + b), ("times", "*", a * b))
    )
    forms = "What is {}?|How much is {}?|What's {}?|Calculate {}.|{}|Compute {}."
    spoken = values.pick((f"{a} {word} {b}", f"{a} {sign} {b}", f"{a}{sign}{b}"))
    question = values.form(forms).format(spoken)
    answer = f"{a} {word} {b} is {result}."
    return Task(question, [], [], answer, f"The user asks for {a} {word} {b}.", "arithmetic")


def repeat(values: Values) -> Task:
    phrase = values.words(values.number(2, 12))
    forms = 'Repeat: {}|Repeat after me: {}|Repeat this: {}|Repeat "{}"|Echo {}|Copy this text: {}'
    question = values.form(forms).format(phrase)
    return Task(question, [], [], phrase, "I repeat the text.", "repeat")


def introduction(values: Values) -> Task:
    person = values.person()
    forms = "My name is {}.|I am {}.|Hi, I am {}.|Hello, my name is {}.|Call me {}.|I'm {}"
    question = values.form(forms).format(person)
    answer = f"Hello {person}! How can I help you?"
    return Task(question, [], [], answer, f"The user is {person}.", "talk")


def recall(values: Values) -> Task:
    """Return a question about an earlier message."""
    first = introduction(values)
    person = first.thought.removeprefix("The user is ").removesuffix(".")
    history = [
        {"role": "user", "content": first.question},
        {"role": "assistant", "content": first.answer},
    ]
    forms = (
        "What is my name?|What's my name?|Who am I?|Do you know my name?|Do you remember my name?"
    )
    answer = f"Your name is {person}."
    question = values.form(forms)
    return Task(question, [], [], answer, f"The user is {person}.", "talk", history)


def unknown(values: Values) -> Task:
    form = values.form(UNKNOWN)
    question = form.format(values.words(values.number(1, 2)), values.word())
    return Task(question, [], [], "I do not know that.", "I do not know this.", "unknown")


PLAIN = (
    *(small_talk,) * 5,
    *(capital,) * 4,
    *(colour, opposite, unknown, introduction),
    *(small_sum,) * 4,
    *(repeat, repeat, recall, recall),
)


def plain_task(values: Values) -> Task:
    return values.pick(PLAIN)(values)
