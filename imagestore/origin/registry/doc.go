// Package registry opens the disk inside an OCI containerDisk as an origin.Stream: an image of a registry, as KubeVirt
// knows it, whose layers hold one file in /disk/ (qcow2 or raw). The bytes of the file stream out of the blob of a
// layer. Nothing is unpacked onto a disk, and names in the archive are compared and shown, never used as paths.
//
//	docker://registry.example.com/disks/fedora:42
//	   index ---> manifest ---> layers, the topmost first ---> blob ---> gzip | zstd | plain ---> tar ---> /disk/x
//
// The library go-containerregistry authenticates, fetches manifests and compares their digests. The package owns the
// resume of blobs, the search through the layers, and the limits (docs/decisions/0018-oci-client.md).
//
// Only digests are trusted. The digest of a blob is known at the end of the blob, so the last Read (and Settled)
// reports a mismatch, and an importer commits nothing before. Every layer is read to its end, because an upper layer
// can hide files of lower layers, and because two disks are an error.
//
// Registries are hostile input: sizes and counts have limits, messages show no credentials and no query, credentials go
// to the registry and over TLS to its token service alone, and addresses inside the network are refused
// (origin.GuardTransport).
//
// A Stream belongs to one goroutine. Close of the Stream ends the goroutines of the decoders and the connections. The
// only locks guard single fields (blob.mu, origin.HashStates) and are never held together.
package registry
