"""What speculation is measured on: passages to be repeated or edited, and free writing. Fixed before any tuning."""

from __future__ import annotations

PASSAGES = (
    "The lighthouse at Corran Point was built in 1887 by the engineer Robert Hale. It stands on a black rock "
    "two miles from the coast, and for ninety years three keepers lived there at a time. In winter the boat "
    "could not land for weeks, and the keepers ate dried fish and bread that they baked themselves. The lamp "
    "was changed to electric light in 1961, and the last keeper left in 1977.",
    "def total_price(items, discount):\n    total = 0\n    for item in items:\n        price = item['price'] * "
    "item['quantity']\n        total = total + price\n    if discount is not None:\n        total = total - "
    "total * discount\n    return total\n",
    "Dear Ms. Alvarez, thank you for your letter of March 3. We are sorry to hear that the washing machine "
    "which you bought in our shop in February does not work. Please send us the number of your receipt and a "
    "photo of the label on the back of the machine. We will then send a technician to you within five working "
    "days, free of charge.",
    "Mix 200 g of flour with 100 g of sugar and a pinch of salt. Add 120 g of cold butter in small pieces and "
    "work it in with your fingers until the dough looks like crumbs. Add one egg and knead quickly. Wrap the "
    "dough and leave it in the fridge for one hour. Roll it out, cut round biscuits, and bake them at 180 "
    "degrees for twelve minutes.",
    '{\n  "name": "weather-station",\n  "version": "1.4.2",\n  "sensors": [\n    {"id": 1, '
    '"kind": "temperature", "unit": "celsius"},\n    {"id": 2, "kind": "humidity", "unit": '
    '"percent"},\n    {"id": 3, "kind": "wind", "unit": "km/h"}\n  ],\n  "interval": 60\n}\n',
    "The meeting began at nine o'clock. Mr. Brown said that the new bridge would cost four million pounds and "
    "would be ready in two years. Mrs. Green asked whether the old bridge could be repaired for less. Mr. "
    "Brown answered that it could, but that lorries of more than ten tonnes would still have to go round by "
    "the motorway. The council voted for the new bridge by eleven votes to six.",
    "Rivers carry sand and stones from the mountains to the sea. Where the water is fast, it takes large "
    "stones with it; where it slows down, the stones are left behind first, then the sand, and at last the "
    "mud. That is why the bed of a river is full of stones in the mountains and full of mud near the sea. "
    "After a flood the bed can look quite different from before.",
    "1. Unplug the printer and wait for one minute.\n2. Open the front door of the printer and take out the "
    "paper tray.\n3. Remove any paper that is stuck between the rollers.\n4. Put the paper tray back and close "
    "the front door.\n5. Plug in the printer and print a test page.\n",
)
TASKS = (
    "Repeat the following text exactly, word for word:\n\n{passage}",
    "Write the following text again and change nothing but the first number in it:\n\n{passage}",
    "Copy the following text, and then write the word END:\n\n{passage}",
)
REPEATING = tuple(task.format(passage=passage) for passage in PASSAGES for task in TASKS)

FREE = (
    "Tell me a story about a fox who learns to swim.",
    "Why is the sky blue? Explain it to a child.",
    "Describe your ideal holiday in a few paragraphs.",
    "What are the advantages of living in a small town?",
    "Write a short letter to a friend who is ill.",
    "How does a bicycle stay upright?",
    "Write a poem about the sea in autumn.",
    "What would happen if there were no moon?",
    "Describe a busy market in the morning.",
    "Explain how bread is made.",
    "Tell me about the life of a bee.",
    "Write the beginning of a detective story.",
    "What should I think of before I buy a used car?",
    "Describe an old house at the end of a long road.",
    "Why do people keep diaries?",
    "Write a dialogue between a teacher and a late student.",
    "How do mountains come into being?",
    "Give advice to someone who wants to learn to cook.",
    "Describe the sounds of a city at night.",
    "What is the difference between weather and climate?",
    "Write about a day on which everything went wrong.",
    "How can I sleep better?",
    "Tell me about an invention that changed the world.",
    "Describe a walk through a forest after rain.",
)
