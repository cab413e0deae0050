"""croissant.json: the data of a release in MLCommons' Croissant 1.0 format.

The files are those in the bundle; the record set `sources` reads data/sources.jsonl, a record per source file.
"""

import json
from typing import Any

from lt_trainer.release.data_files import SOURCE_LIST
from lt_trainer.release.facts import Facts

CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
"""JSON-LD context of the format's version 1.0."""
FORMATS = {".jsonl": "application/jsonlines", ".json": "application/json", ".txt": "text/plain", ".md": "text/markdown"}
FORMATS |= {".csv": "text/csv", ".parquet": "application/x-parquet"}
FIELDS = {"store": "sc:Text", "path": "sc:Text", "bytes": "sc:Integer", "sha256": "sc:Text", "license": "sc:Text"}
FIELDS |= {"redistribute": "sc:Boolean", "url": "sc:Text", "file": "sc:Text"}


def croissant_document(facts: Facts) -> str:
    """Return the text of croissant.json."""
    info = facts.info.release
    licenses = sorted({entry.license for entry in facts.sources if entry.license})
    files = {entry.file: entry.sha256 for entry in facts.sources if entry.file}
    document: dict[str, Any] = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": f"{info.name}-data",
        "description": f"Sources of the training and validation data of {info.name}; see DATA_CARD.md.",
        "datePublished": facts.provenance.date,
        "version": info.version or "1",
        "citeAs": f"{info.producer}: {info.name}, {facts.provenance.date[:4]}; see CITATION.cff",
        "creator": {"@type": "sc:Organization", "name": info.producer},
        "distribution": [
            _file("source-list", SOURCE_LIST, facts.source_list_sha256),
            *(_file(f"file-{i}", path, digest) for i, (path, digest) in enumerate(sorted(files.items()))),
        ],
        "recordSet": [_record_set()],
    }
    if licenses:
        document["license"] = licenses if len(licenses) > 1 else licenses[0]
    if info.url:
        document["url"] = info.url
    return json.dumps(document, indent=1) + "\n"


def _file(identity: str, path: str, digest: str) -> dict[str, Any]:
    suffix = path[path.rfind(".") :].lower() if "." in path.rpartition("/")[2] else ""
    return {
        "@type": "cr:FileObject",
        "@id": identity,
        "name": path,
        "contentUrl": path,
        "encodingFormat": FORMATS.get(suffix, "application/octet-stream"),
        "sha256": digest,
    }


def _record_set() -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": "sources",
        "name": "sources",
        "description": "A record per source file.",
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"sources/{name}",
                "name": name,
                "dataType": kind,
                "source": {"fileObject": {"@id": "source-list"}, "extract": {"column": name}},
            }
            for name, kind in FIELDS.items()
        ],
    }
