"""The retrieval service: any retriever over HTTP, read-only and stateless. See docs/service.md."""
