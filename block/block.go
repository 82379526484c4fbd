// Package block is the one verb of Drover: fill a layer from a source. It holds the seams that the rooms share without
// knowing each other: Source and Sink (bytes with holes), Copy (parallel, hole-aware, cancellable), Request (one I/O of
// an attached volume), and Layers (what image movers need of a disk). Standard library only; it starts goroutines only
// inside Copy, which waits for them.
package block

import (
	"context"
	"encoding/json"
	"io"
)

// Size is the granularity of every map, in bytes.
const Size = 4096

// Kind says what a range of a Source or layer holds.
type Kind uint8

// Kinds of range. Zero differs from Hole in that it hides what lies below.
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
	// Next is the extent that holds off, from off on, as long as is cheap to know. Off must be below Size.
	Next(off int64) (Extent, error)
	io.Closer
}

// Dropper is what a reader of an image may find behind its io.ReaderAt: scratch room. Drop says that the bytes
// [off, off+n) were read and will not be asked for again; who asks all the same may get an error.
type Dropper interface {
	Drop(off, n int64)
}

// Sink takes what a Source holds. WriteAt and ZeroAt may be called from several goroutines at once, for ranges that do
// not overlap; ranges never given stay holes.
type Sink interface {
	io.WriterAt
	// ZeroAt makes a range explicitly zero.
	ZeroAt(off, n int64) error
	// Sync returns once every earlier WriteAt and ZeroAt survives power loss. After an error all of them count as lost.
	Sync(ctx context.Context) error
}

// Op is what a Request asks for.
type Op uint8

// Ops of an attached volume.
const (
	OpRead    Op = iota
	OpWrite      // Buf to Off
	OpFlush      // all that was acknowledged before is durable when this is done
	OpDiscard    // content becomes zero; space is given back
	OpZero       // content becomes zero
)

// Request is one I/O of an attached volume. It is submitted once and completed once, on the thread of the loop that
// carries the volume. Whoever submits owns it again after Done; between, the submittee owns Buf too.
type Request struct {
	Op  Op
	FUA bool   // a write that is durable when done
	Off int64  // bytes; any multiple of 512
	Len int64  // bytes; any multiple of 512; equals len(Buf) for reads and writes
	Buf []byte // page-aligned, resident and private memory
	// Spans of a write are the pieces of Buf that are to be written, ascending, apart, whole blocks from its start: a
	// fragmented copy, which is written at leisure and is durable with the next flush. The rest of Buf is what is there
	// already, so who knows no spans may write all of it. Nil: all.
	Spans []Span
	Err   error // outcome, set before Done is called; a syscall.Errno where the kernel said so
	// Lent is set by who answers, with an error, a request whose Buf a disk that hangs may still use; and by who answers
	// one of which that was a part. Then Buf is not what was submitted any more if it was a read; it holds the answer.
	Lent *Lent
	// Done is called exactly once, on the loop's thread.
	Done func(*Request)
	// Tag belongs to whoever submitted it.
	Tag uint64
}

// Span is a piece of a buffer.
type Span struct{ Off, Len int64 }

// Submitter starts requests. Submit is called on the loop's thread and must not block.
type Submitter interface {
	Submit(*Request)
}

// Image is what a disk records of a backing image.
type Image struct {
	UID         string   `json:"uid"`
	Name        string   `json:"name"`
	Layers      []string `json:"layers"`      // bottom first
	Format      string   `json:"format"`      // of the source: raw, qcow2, qcow2.xz, ...
	VirtualSize int64    `json:"virtualSize"` // bytes, as the source says; layers are padded to Size
	Checksum    string   `json:"checksum"`    // SHA-512 of the source's bytes, hex
	Digest      string   `json:"digest"`      // root digest of the top layer's content; empty: not all layers have one yet
	// Object is what the API knew of the image: opaque here, for who rebuilds objects from disks.
	Object json.RawMessage `json:"object,omitempty"`
}

// Layers is what image movers need of one disk. Implemented by replicas/stack, wired by driver.
// Methods are safe for concurrent use, also by several processes on the same disk.
type Layers interface {
	// UID of the disk, from its own record.
	UID() string
	// Create starts a layer of size bytes (rounded up to Size) under uid. A half-made layer of that uid is removed
	// first; a finished one is an error of kind exists.
	Create(ctx context.Context, uid string, size int64) (LayerWriter, error)
	// Open opens a finished layer for reading; it stays readable until closed, whatever happens to its name.
	Open(uid string) (Source, error)
	// Digest is the root digest of a finished layer, and the bytes it takes on the disk.
	Digest(uid string) (root string, allocated int64, err error)
	// Verify reads a finished layer and compares every chunk's digest.
	Verify(ctx context.Context, uid string) error
	// PutImage records an image: the commit point of an import. Its layers must be finished, if it has a digest.
	PutImage(img Image) error
	// Images lists the images recorded on the disk.
	Images() ([]Image, error)
	// RemoveImage forgets an image; layers that nothing names go. No image of that uid: no error.
	// An image whose layers a replica names is refused with kind in use.
	RemoveImage(uid string) error
}

// Exporter is a Layers that has snapshots of volumes, of which images can be made.
type Exporter interface {
	// Hold finds the layers of a snapshot in a replica, bottom first, and keeps them for an image, whatever becomes of
	// the snapshot. What was held for it before is told again.
	Hold(ctx context.Context, image, name, replica, snapshot string) (layers []string, size int64, err error)
	// Name is PutImage for layers that were held, and lets go of the hold. It returns the image with its digest, or
	// without one where its layers lack digests: those are then made by Digests. Layers that are damaged are refused with
	// kind unavailable: they may be repaired.
	Name(ctx context.Context, img Image) (Image, error)
	// Digests makes the digests that the layers of an image lack, and records it with its own. Somebody else is at it: an
	// error of kind busy.
	Digests(ctx context.Context, img Image) (Image, error)
	// Taken is what the layers of an image without a digest take on the disk, in bytes. All of them must be there.
	Taken(img Image) (int64, error)
	// Forget is RemoveImage for an image whose layers may be those of volumes, which keep them. It ends a hold, too.
	Forget(image string) error
	// OpenStack opens layers, bottom first, as one source of size bytes.
	OpenStack(layers []string, size int64) (Source, error)
}

// Exact is a LayerWriter that can be held to a layer that there is already: blocks of zeros that are written stay data,
// and Seal refuses content of another root digest.
type Exact interface {
	Exact(root string)
}

// LayerWriter fills one new layer.
type LayerWriter interface {
	Sink
	// Resize gives the layer another size (rounded up to Size): for a source that tells its length only at its end. It
	// may grow while it is written to; to shrink, no other call may be under way.
	Resize(size int64) error
	// Seal makes the layer durable and immutable, with digests, and publishes it under its uid.
	Seal(ctx context.Context) (root string, allocated int64, err error)
	// Abort removes what was written. After Seal it does nothing.
	Abort() error
}

// Keeper is a LayerWriter whose half-made layer can be continued by another process (see Resumer).
type Keeper interface {
	LayerWriter
	// Keep records durably that all bytes before upTo, a multiple of ChunkSize, are there, and a note (JSON) of the
	// caller. No other call may be under way for bytes before upTo.
	Keep(upTo int64, note []byte) error
	// Leave ends the work without removing what was kept. After Seal and Abort it does nothing.
	Leave() error
	// Beside opens a file that lies beside the layer while it is made, and goes with it; name is a word. It is made where
	// it is not there. What is in it is for the caller to make durable, and to close.
	Beside(name string) (Scratch, error)
	// ReadAt reads what is in the layer so far; what was not written is zero.
	io.ReaderAt
}

// Scratch is room for what cannot be in the layer yet.
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
	// Resume continues a layer with what the last Keep recorded; what was written later is gone. Nothing kept: an error
	// of kind not found.
	Resume(ctx context.Context, uid string) (w Keeper, upTo int64, note []byte, err error)
}
