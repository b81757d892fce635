"""Cohere's clients of both versions: documents in the order of their relevance."""

import cohere
from checks import MODEL, URL, check, error_of, main
from cohere.core.api_error import ApiError

QUERY = "How does a request end?"
DOCUMENTS = ["The weather in Lisbon is mild.", "A request ends with its last token.", "Cats sleep."]


def assert_ranked(results: list, num_results: int) -> None:
    scores = [result.relevance_score for result in results]
    assert len(scores) == num_results
    assert scores == sorted(scores, reverse=True)
    assert len({result.index for result in results}) == num_results


@check
def rerank() -> None:
    client = cohere.Client("none", base_url=URL)
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    assert_ranked(answer.results, 3)


@check
def rerank_of_version_2() -> None:
    client = cohere.ClientV2("none", base_url=URL)
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2)
    assert_ranked(answer.results, 2)


@check
def both_versions_agree() -> None:
    first = cohere.Client("none", base_url=URL).rerank(
        model=MODEL, query=QUERY, documents=DOCUMENTS, return_documents=True
    )
    second = cohere.ClientV2("none", base_url=URL).rerank(
        model=MODEL, query=QUERY, documents=DOCUMENTS
    )
    for one, two in zip(first.results, second.results, strict=True):
        assert (one.index, one.relevance_score) == (two.index, two.relevance_score)
        assert one.document is not None
        assert one.document.text == DOCUMENTS[one.index]


@check
def errors() -> None:
    client = cohere.ClientV2("none", base_url=URL)
    error = error_of(ApiError, client.rerank, model=MODEL, query=QUERY, documents=[])
    assert error.status_code == 400
    assert "documents" in str(error.body)


main()
