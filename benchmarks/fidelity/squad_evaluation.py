"""Exact match and F1 of a SQuAD predictions file, independent of the package.

Reads the data set's JSON (gzip or not) and {question id: answer} with the standard library only,
to verify the scores that fine-tuning prints.

    python benchmarks/fidelity/squad_evaluation.py dev-v1.1.json.gz WORKDIR/.../predictions.json
"""

import argparse
import gzip
import json
import string

ARTICLES = {"a", "an", "the"}
WORD_CHARACTERS = set(string.ascii_letters + string.digits + "_")


def words(text: str) -> list[str]:
    """Returns lower-case words without punctuation and articles, character by character."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    out, run = [], ""
    for character in kept + " ":  # an article is a whole run of word characters
        if character in WORD_CHARACTERS or character.isalnum():
            run += character
            continue
        out.append(" " if run in ARTICLES else run)
        out.append(character)
        run = ""
    return "".join(out).split()


def overlap(prediction: list[str], truth: list[str]) -> float:
    left, shared = list(truth), 0
    for word in prediction:
        if word in left:
            left.remove(word)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(truth)
    return 2 * precision * recall / (precision + recall)


def evaluate(articles: list[dict], predictions: dict[str, str]) -> dict[str, float]:
    """Returns {"exact_match", "f1"} in percent, by SQuAD 2.0 if any question is impossible."""
    questions = [q for a in articles for p in a["paragraphs"] for q in p["qas"]]
    second = any(q.get("is_impossible") for q in questions)
    exact = f1 = 0.0
    for question in questions:
        if question["id"] not in predictions:
            continue
        given = words(predictions[question["id"]])
        truths = [words(answer["text"]) for answer in question["answers"]]
        if second:
            truths = [truth for truth in truths if truth] or [[]]
        if question.get("is_impossible"):
            truths = [[]]
        exact += any(given == truth for truth in truths)
        if second and (not given or truths == [[]]):
            f1 += given == truths[0]
        else:
            f1 += max((overlap(given, truth) for truth in truths), default=0.0)
    return {"exact_match": 100 * exact / len(questions), "f1": 100 * f1 / len(questions)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", help="dev-v1.1.json, dev-v2.0.json; .gz or not")
    parser.add_argument("predictions", help="predictions.json: {question id: answer}")
    arguments = parser.parse_args()
    opener = gzip.open if arguments.questions.endswith(".gz") else open
    with opener(arguments.questions, "rb") as file:
        articles = json.load(file)["data"]
    with open(arguments.predictions, encoding="utf-8") as file:
        predictions = json.load(file)
    print(json.dumps(evaluate(articles, predictions)))


if __name__ == "__main__":
    main()
