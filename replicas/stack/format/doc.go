// Package format encodes and decodes the files of a disk, as docs/formats.md describes them: the envelope of metadata
// files, the map, digests and checksums of a layer, the zero log of a head, and the intents of a replica. Index holds a
// map in memory.
//
// The package knows no disk, layer or replica: a caller passes bytes, a handle or a file name. Decoders bound and check
// their input, and refuse versions that they do not know; fuzz tests hold them. The package starts no goroutines and
// has no locks: an Index, a ZeroLog and Intents belong to one goroutine at a time.
package format
