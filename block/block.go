// Package block is the one verb of Drover: fill a layer from a source. The package holds the seams that the rooms
// share without knowing each other: Source and Sink (bytes with holes), Copy (parallel, hole-aware, cancellable),
// Request (one I/O of an attached volume), and Layers (the part of a disk that image movers need). Standard library
// only; only Copy starts goroutines, and waits for them.
package block

import (
	"context"
	"encoding/json"
	"io"
	"time"
)

// Size is the granularity of every map, in bytes.
const Size = 4096

// Kind tells the content of a range of a Source or layer.
type Kind uint8

// Kinds of range. Zero differs from Hole: a Zero hides the layers below.
const (
	Hole Kind = iota // nothing here: reads as zeros, or as the layer below
	Zero             // explicitly zero
	Data
)

// Extent is a range [Off, Off+Len) in bytes of one kind.
type Extent struct {
	Off, Len int64
	Kind     Kind
}

// End is the first byte after the extent.
func (e Extent) End() int64 { return e.Off + e.Len }

// Source is a finite run of bytes with holes. ReadAt and Next may be called from several goroutines at once.
type Source interface {
	io.ReaderAt // full reads, or an error; io.EOF only at Size; holes read as zeros
	// Size in bytes; need not be a multiple of the block size.
	Size() int64
	// Next is the extent that holds off, from off on, as far as is cheap to know. Off must be below Size.
	Next(off int64) (Extent, error)
	io.Closer
}

// DigestSource is a Source that knows digests.
type DigestSource interface {
	Source
	// Digest returns the SHA-256 of a chunk's bytes (ChunkSize bytes; the last chunk may be short), if the source knows
	// this digest without a read of the bytes. ReadAt compares the bytes of such a chunk with checksums that are as old
	// as the digest. Digest may be called from several goroutines at once.
	Digest(chunk int64) (sum [32]byte, known bool)
}

// CacheBypasser is a Source that can leave the page cache to other readers.
type CacheBypasser interface {
	// BypassCache makes large reads into aligned memory bypass the page cache, where the source can. A caller that reads
	// everything once calls BypassCache before the first read.
	BypassCache()
}

// Dropper is scratch room behind an io.ReaderAt of an image. With Drop the reader promises to read the bytes [off,
// off+n) no more; a later read of these bytes may fail.
type Dropper interface {
	Drop(off, n int64)
}

// Sink takes the content of a Source. Several goroutines may call WriteAt and ZeroAt at once, for ranges that do not
// overlap; ranges never given stay holes.
type Sink interface {
	io.WriterAt
	// ZeroAt makes a range explicitly zero.
	ZeroAt(off, n int64) error
	// Sync returns once every earlier WriteAt and ZeroAt survives power loss. After an error all of these count
	// as lost.
	Sync(ctx context.Context) error
}

// DigestSink is a Sink that takes digests, so that it hashes no chunk again.
type DigestSink interface {
	Sink
	// WriteChunk is WriteAt for a whole chunk (the last one of the sink may be short). The caller has just computed
	// digest, the SHA-256 of p, from the memory of p.
	WriteChunk(p []byte, off int64, digest [32]byte) error
}

// Op is the operation of a Request.
type Op uint8

// Ops of an attached volume.
const (
	OpRead    Op = iota
	OpWrite      // Buf to Off
	OpFlush      // makes all acknowledged writes durable
	OpDiscard    // content becomes zero; space is given back
	OpZero       // content becomes zero
)

// Request is one I/O of an attached volume. The submitter submits a Request once; the backend completes it once, on
// the thread of the loop that carries the volume. The submitter owns the Request again after Done; until then the
// backend owns Buf too.
type Request struct {
	Op  Op
	FUA bool   // a write, durable when done
	Off int64  // bytes; any multiple of 512
	Len int64  // bytes; any multiple of 512; equals len(Buf) for reads and writes
	Buf []byte // page-aligned, resident and private memory
	// Spans of a write are the pieces of Buf to write, ascending, apart, whole blocks from the start of Buf: a
	// fragmented copy, written at leisure and durable with the next flush. The rest of Buf equals the stored
	// data, so a backend without knowledge of spans may write all of Buf. Nil: all.
	Spans []Span
	Err   error // outcome, set before Done is called; a syscall.Errno where the kernel said so
	// Lease is set by a backend that answers a request with an error while a hanging disk may still use Buf, and
	// by the backend of a request of which such a request was a part. A read then has another Buf than the
	// submitted one, with the answer.
	Lease *BufferLease
	// Done is called exactly once, on the loop's thread.
	Done func(*Request)
	// Tag belongs to the submitter.
	Tag uint64
}

// Span is a piece of a buffer.
type Span struct{ Off, Len int64 }

// Submitter starts requests. Submit is called on the loop's thread and must not block.
type Submitter interface {
	Submit(*Request)
}

// Image is a disk's record of a backing image.
type Image struct {
	UID         string   `json:"uid"`
	Name        string   `json:"name"`
	Layers      []string `json:"layers"`      // bottom first
	Format      string   `json:"format"`      // of the source: raw, qcow2, qcow2.xz, ...
	VirtualSize int64    `json:"virtualSize"` // bytes, as the source says; layers are padded to Size
	Checksum    string   `json:"checksum"`    // SHA-512 of the source's bytes, hex
	Digest      string   `json:"digest"`      // root digest of the top layer; empty: some layers lack digests
	// the API's object, opaque here: for rebuilding objects from disks
	Object json.RawMessage `json:"object,omitempty"`
}

// Layers is the part of a disk that image movers need. Implemented by replicas/stack, wired by driver. Methods are
// safe for concurrent use, also by several processes on the same disk.
type Layers interface {
	// UID of the disk, from the disk's own record.
	UID() string
	// Create starts a layer of size bytes (rounded up to Size) under uid. Create first removes a half-made layer
	// of the same uid; a finished layer is an error of kind exists.
	Create(ctx context.Context, uid string, size int64) (LayerWriter, error)
	// Open opens a finished layer for reading; the layer stays readable until closed, even if its name is
	// removed.
	Open(uid string) (Source, error)
	// Digest is the root digest of a finished layer, and the layer's bytes on the disk.
	Digest(uid string) (root string, allocated int64, err error)
	// Verify reads a finished layer and compares every chunk's digest.
	Verify(ctx context.Context, uid string) error
	// PutImage records an image: the commit point of an import. If the image has a digest, all layers must be
	// finished.
	PutImage(img Image) error
	// Images lists the images recorded on the disk.
	Images() ([]Image, error)
	// RemoveImage forgets an image and removes layers without a reference. No image of that uid: no error. An
	// image whose layers a replica references is refused with kind in use.
	RemoveImage(uid string) error
}

// Exporter is a Layers with snapshots of volumes, from which images can be made.
type Exporter interface {
	// Hold finds the layers of a snapshot in a replica, bottom first, and keeps the layers for an image, even if
	// the snapshot is deleted. A repeated call returns the layers that are held already.
	Hold(ctx context.Context, image, name, replica, snapshot string) (layers []string, size int64, err error)
	// Name is PutImage for held layers, and ends the hold. Name returns the image with a digest, or without a
	// digest where layers lack digests: Digests then makes the missing digests. Damaged layers are refused with
	// kind unavailable: a repair may follow.
	Name(ctx context.Context, img Image) (Image, error)
	// Digests makes and records the missing digests of an image's layers, and the image's digest. An error of
	// kind busy: another caller makes these digests.
	Digests(ctx context.Context, img Image) (Image, error)
	// Taken is the size on the disk, in bytes, of the layers of an image without a digest. All layers must exist.
	Taken(img Image) (int64, error)
	// Forget is RemoveImage for an image whose layers may belong to volumes, which keep the layers. Forget also
	// ends a hold.
	Forget(image string) error
	// OpenStack opens layers, bottom first, as one source of size bytes.
	OpenStack(layers []string, size int64) (Source, error)
}

// SnapshotCut is one try of a snapshot. A replica that was dropped during a cut may have a snapshot of the same UID,
// and of another instant and content.
type SnapshotCut struct {
	UID     string
	Created time.Time // the instant of the cut
}

// SnapshotDisk is the part of a disk that backups need. Implemented by replicas/stack, wired by driver.
// Methods are safe for concurrent use, also by several processes on the same disk.
type SnapshotDisk interface {
	LayerReader
	// HoldSnapshot finds the layers of a snapshot in a replica, bottom first, with the size of the snapshot in bytes, and
	// keeps the layers for holder, a UID, even if the snapshot or the replica is deleted. name is the holder's name. A
	// repeated call returns the layers that are held already; a call for another cut ends the hold first. An error of
	// kind not found: the disk has no such replica or cut. An error of kind busy: a layer is being copied or merged; try
	// again later.
	HoldSnapshot(ctx context.Context, holder, name, replica string, snapshot SnapshotCut) (layers []string, size int64,
		err error)
	// HoldLayers keeps layers, of an image for example, for holder as HoldSnapshot does. An error of kind busy: a layer is
	// being merged, or has no reference on the disk.
	HoldLayers(ctx context.Context, holder, name string, layers []string) error
	// OpenSnapshot opens the layers of a snapshot in a replica as OpenStack does, without a hold: the open layers stay
	// readable, and are not merged before the source is closed, so a caller who needs long holds the snapshot. Errors of
	// kind not found: as HoldSnapshot, or the disk lacks a layer. An error of kind busy: a layer is being cut or merged.
	OpenSnapshot(replica string, snapshot SnapshotCut) (Source, error)
	// ReleaseSnapshot ends the hold of a holder, and removes the layers without another reference. No hold: no error.
	ReleaseSnapshot(holder string) error
	// HeldSnapshots returns the names of the holders, by holder. After an error some holders may be missing.
	HeldSnapshots() (map[string]string, error)
	// OpenStack opens layers, bottom first, as one source of size bytes. The source is a DigestSource. An error of kind
	// busy: a cut is in progress; try again later.
	OpenStack(layers []string, size int64) (Source, error)
	// ChangedChunks lists, in ascending order, the chunks of the snapshot target of a replica whose bytes may differ from
	// the snapshot base, as the maps tell. Beyond the end of the base all chunks with data or zeros differ. The list
	// takes 8 bytes for each chunk that differs. An error of kind not found: the replica, base or target does not exist,
	// or the replica has another cut of that UID. An error of kind busy: a merge is in progress; try again later.
	ChangedChunks(ctx context.Context, replica string, base, target SnapshotCut) ([]int64, error)
}

// Exact is a LayerWriter that can be held to an existing layer: written blocks of zeros stay data, and Seal refuses
// content of another root digest.
type Exact interface {
	Exact(root string)
}

// Backup is an open backup in a store. Implemented by room backups, wired by driver.
type Backup interface {
	Size() int64 // bytes of the volume or image
	// Checksum is the SHA-512 of the bytes that an image was made of, such as a qcow2 file; empty: not known.
	Checksum() string
	// Restore writes the content into a sink whose other bytes read as zeros. The content is durable when Restore returns.
	// A damaged chunk of the backup is an error of kind corrupt.
	Restore(ctx context.Context, sink Sink) error
	// Restored returns how many bytes Restore has written, of how many that Restore knows of so far.
	Restored() (done, total int64)
	io.Closer
}

// ContinuedBackup is a Backup that is opened again to continue a restore.
type ContinuedBackup interface {
	Backup
	// Leave is Close, but keeps what protects the backup in its store until the backup is opened again.
	Leave() error
}

// FileBackup is a Backup of the file that an image was made of, in any format: the disk inside has another size, and is
// restored by an import of the file.
type FileBackup interface {
	Backup
	// File reads the Size bytes of the file.
	File() io.ReaderAt
}

// LayerWriter fills one new layer.
type LayerWriter interface {
	Sink
	// Resize gives the layer another size (rounded up to Size), for a source that tells its length only at the
	// end. The layer may grow during writes; to shrink, no other call may be in progress.
	Resize(size int64) error
	// Seal makes the layer durable and immutable, with digests, and publishes the layer under its uid.
	Seal(ctx context.Context) (root string, allocated int64, err error)
	// Abort removes the written data. After Seal, Abort does nothing.
	Abort() error
}

// CheckpointWriter is a LayerWriter whose half-made layer another process can continue (see Resumer).
type CheckpointWriter interface {
	LayerWriter
	// Checkpoint records durably that all bytes before upTo, a multiple of ChunkSize, are written, and a note (JSON) of
	// the caller. No other call may be in progress for bytes before upTo.
	Checkpoint(upTo int64, note []byte) error
	// Leave ends the work without removing the checkpoint. After Seal and Abort, Leave does nothing.
	Leave() error
	// Beside opens a file that lies beside the half-made layer and is removed with the layer; name is a word.
	// Beside makes a missing file. The caller makes the content durable, and closes the file.
	Beside(name string) (Scratch, error)
	// ReadAt reads the layer's content so far; bytes never written are zero.
	io.ReaderAt
}

// ChunkAdopter is a Sink that may hold bytes of an earlier process, whose chunks count again if their digests say so.
type ChunkAdopter interface {
	Sink
	// AdoptChunks reads what the disk has of each chunk. A chunk that matches its digest counts as written, and
	// adopted is called with its number, from several goroutines; every other chunk becomes a hole. No other call may be
	// in progress.
	AdoptChunks(ctx context.Context, digestOf func(chunk int64) (digest [32]byte, known bool),
		adopted func(chunk int64)) error
}

// Scratch is room for data that the layer cannot take yet.
type Scratch interface {
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
	// Punch makes a hole; the size stays.
	Punch(off, n int64) error
	// Datasync returns once all earlier writes, holes and sizes survive power loss.
	Datasync() error
	io.Closer
}

// Resumer is a Layers that keeps half-made layers over a restart.
type Resumer interface {
	// Resume continues a layer from the last checkpoint; later writes are lost. No record: an error of
	// kind not found.
	Resume(ctx context.Context, uid string) (w CheckpointWriter, upTo int64, note []byte, err error)
}
