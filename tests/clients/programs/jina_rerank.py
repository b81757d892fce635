"""LangChain's reranker for Jina's API: documents in the order of their relevance."""

from checks import MODEL, URL, check, main
from langchain_community.document_compressors import jina_rerank
from langchain_core.documents import Document

# The library has no setting for the address.
jina_rerank.JINA_API_URL = URL + "/v1/rerank"
QUERY = "How does a request end?"
TEXTS = ["The weather in Lisbon is mild.", "A request ends with its last token.", "Cats sleep."]


def reranker(top_n: int) -> jina_rerank.JinaRerank:
    return jina_rerank.JinaRerank(jina_api_key="none", model=MODEL, top_n=top_n)


@check
def rerank() -> None:
    results = reranker(3).rerank(TEXTS, QUERY)
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result["index"] for result in results) == [0, 1, 2]


@check
def compress_documents() -> None:
    documents = [Document(page_content=text, metadata={"n": n}) for n, text in enumerate(TEXTS)]
    best = reranker(2).compress_documents(documents, QUERY)
    expected = reranker(3).rerank(TEXTS, QUERY)[:2]
    assert [one.metadata["n"] for one in best] == [result["index"] for result in expected]


main()
