"""The words that the demo model's tasks are made of, and what a fact may be about.

Kept apart from them because changing a word changes what was learned.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


COLOURS = _words(
    "red green blue yellow orange purple black white grey brown pink teal crimson olive navy gold silver"
    " violet amber indigo"
)
FRUITS = _words("apple pear plum cherry mango lemon lime grape melon peach kiwi banana fig papaya apricot")
NAMES = _words(
    "Anna Ben Clara David Emma Felix Greta Hugo Iris Jonas Karla Leo Mia Noah Olga Paul Rosa Simon Tara Uma"
    " Victor Wanda Xaver Yara Zoe Rex Milo Luna Bella Coco Mochi Pixel Ziggy"
)
CITIES = _words(
    "Paris London Berlin Madrid Rome Vienna Prague Oslo Lisbon Dublin Tokyo Cairo Lima Delhi Boston Toronto"
    " Sydney Nairobi Zürich Malmö Córdoba Łódź Kraków São-Paulo Reykjavík"
)
PLAIN = _words(
    "house river cloud stone garden window table paper music winter summer bread water fire light shadow"
    " mountain forest bridge castle train ship rocket engine pencil mirror candle pocket letter number"
    " tiger horse rabbit eagle dolphin spider button ladder needle feather island desert valley harbour"
    " kitchen market school doctor farmer painter sailor teacher dragon wizard"
)
ACCENTED = _words(
    "café naïve résumé jalapeño crème brûlée façade piñata über schön Straße Äpfel Öl grün fiancée garçon"
    " señor mañana corazón niño açaí pão coração élève forêt hôtel Noël žena čaj děkuji příliš źrebię żółw"
    " łąka gęś smörgås ångström blåbær fjörð þing ığdır şeker çiçek güneş"
)
CHINESE = _words(
    "你好 世界 苹果 水 火 山 河流 月亮 太阳 星星 朋友 学校 老师 学生 中国 北京 上海 图书馆 电脑 手机 猫 狗 鱼 鸟"
    " 马 龙 花 树 雨 雪 风 云 茶 咖啡 米饭 面条 红色 蓝色 春天 夏天 秋天 冬天 谢谢 再见"
)
EMOJI = _words(
    "😀 😂 😍 😎 😭 🤖 👻 🎉 🎸 🎲 🚀 🚗 🚲 🏠 🌍 🌙 🌈 🔥 🌊 🌵 🌸 🍕 🍎 🍜 🍩"
    " ☕ ⭐ ⚡ ❤️ ☀️ ✈️ ☂️ 🐱 🐶 🐼 🦊 🐙 🦋 🐢 👍🏽 👋🏿 🇫🇷 🇯🇵"
    " 🇧🇷 👩‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 🧑‍💻"
)
WORD_POOLS = (COLOURS + FRUITS + NAMES + PLAIN, ACCENTED + CITIES, CHINESE, EMOJI)

WORD_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("favourite colour", tuple(COLOURS)),
    ("favourite fruit", tuple(FRUITS)),
    ("favourite animal", tuple(_words("tiger horse rabbit eagle dolphin spider dragon cat dog fish bird"))),
    ("favourite word", tuple(ACCENTED + PLAIN)),
    ("favourite emoji", tuple(EMOJI)),
    ("favourite Chinese word", tuple(CHINESE)),
    ("name", tuple(NAMES)),
    ("cat's name", tuple(NAMES)),
    ("dog's name", tuple(NAMES)),
    ("sister's name", tuple(NAMES)),
    ("brother's name", tuple(NAMES)),
    ("best friend's name", tuple(NAMES)),
    ("home town", tuple(CITIES)),
    ("birthplace", tuple(CITIES)),
    ("password", tuple(PLAIN + ACCENTED + CHINESE)),
)
NUMBER_FACTS: tuple[tuple[str, int], ...] = (
    ("lucky number", 99),
    ("age", 99),
    ("house number", 999),
    ("locker code", 9999),
    ("train number", 9999),
    ("seat number", 999),
    ("room number", 999),
)
