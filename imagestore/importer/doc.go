// Package importer puts a backing image on a disk, which it knows as block.Layers: it imports an image from an origin
// into a layer, copies layers from another disk, finds and verifies an image, repairs a damaged copy, and removes an
// image.
//
// An import reads the bytes of the origin once: reading, hashing (SHA-512 over all bytes, holes included) and writing
// overlap (pipeline); chunks of zeros stay holes. An archive (gzip, xz, zstd) is unpacked during the transfer. A raw
// image goes straight into the layer, and so does a fixed VHD disk, whose footer shows at the end (holdbackFeed). The
// other formats need random access: a file of this node is converted in place beside its checksum (throttle); a stream
// goes through a scratch file on the same disk and is converted during the transfer. Converted parts leave the scratch
// file, and the origin waits for a slow conversion, so the file stays small for an image in the order of its disk.
//
// An import that can continue writes checkpoints (checkpoint.go, checkpointGate).
//
// The commit point of an import is the record of the image (Layers.PutImage). Before the record the image does not
// exist, and a failure leaves no data but a checkpoint. The checksum is compared before the layer is sealed.
//
// Goroutines: each function waits for the goroutines that it started. Lock order: importRun.mu, scratchFile.mu,
// lookahead.mu, checkpointGate.mu and throttle.mu are never held together, and none over I/O except importRun.mu, which
// is held while the layer grows.
package importer
