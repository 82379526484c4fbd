package importer

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// A copy writes a checkpoint now and then and continues there after a cut. The checkpoint names the digest of the
// complete layer.

// copyStep is the number of bytes between two looks at the time of the next checkpoint.
const copyStep = 64 << 20

// copyNote is the record beside an incomplete layer.
type copyNote struct {
	Root string `json:"root"`
	Size int64  `json:"size"`
}

// copyLayer makes one layer. An existing layer with the same UID has the same content (I6).
func copyLayer(ctx context.Context, from, on block.Layers, uid string, checkpointEvery time.Duration,
	report func(int64)) (allocated, size int64, err error) {
	root, _, err := from.Digest(uid)
	if err != nil {
		return 0, 0, err
	}
	src, err := from.Open(uid)
	if err != nil {
		return 0, 0, err
	}
	defer src.Close()
	size = src.Size()
	if have, n, err := on.Digest(uid); err == nil && have == root {
		return n, size, nil
	}
	note := copyNote{Root: root, Size: size}
	w, at, err := resumeCopy(ctx, on, uid, note)
	if err != nil {
		return 0, 0, err
	}
	if x, ok := w.(block.Exact); ok {
		x.Exact(root)
	}
	kept, err := copyData(ctx, on, w, src, at, note, checkpointEvery, report)
	var made string
	if err == nil {
		made, allocated, err = w.Seal(ctx)
	}
	if err != nil {
		if k, ok := w.(block.CheckpointWriter); ok && kept && !api.Is(err, api.Corrupt) {
			return 0, 0, errors.Join(err, k.Leave())
		}
		return 0, 0, errors.Join(err, w.Abort())
	}
	if made != root {
		err := api.Errorf(api.Corrupt, "layer %s on disk %s does not match its digest: the copy is thrown away", uid,
			from.UID())
		return 0, 0, errors.Join(err, removeLayer(on, uid))
	}
	return allocated, size, nil
}

// resumeCopy continues at the checkpoint of a copy of the same content, or starts a layer.
func resumeCopy(ctx context.Context, on block.Layers, uid string, note copyNote) (block.LayerWriter, int64, error) {
	if r, ok := on.(block.Resumer); ok {
		if w, upTo, raw, err := r.Resume(ctx, uid); err == nil {
			var was copyNote
			if json.Unmarshal(raw, &was) == nil && was == note {
				return w, upTo, nil
			}
			if err := w.Abort(); err != nil {
				return nil, 0, err
			}
		}
	}
	w, err := createLayer(ctx, on, api.UID(uid), note.Size)
	return w, 0, err
}

// copyData copies the data of src from at on. kept: a checkpoint exists.
func copyData(ctx context.Context, on block.Layers, w block.LayerWriter, src block.Source, at int64, note copyNote,
	checkpointEvery time.Duration, report func(int64)) (kept bool, err error) {
	raw, err := json.Marshal(note)
	if err != nil {
		return false, err
	}
	kept = at > 0
	writer, can := w.(block.CheckpointWriter)
	if checkpointEvery <= 0 {
		checkpointEvery = defaultCopyCheckpointEvery
	}
	sink := guardedSink{w, newSpaceGuard(on)}
	for last := time.Now(); at < note.Size; {
		end := min(at+copyStep, note.Size)
		begin := at
		err := block.Copy(ctx, sink, &sourceRange{src, begin, end},
			block.CopyOptions{Progress: func(done, _ int64) { report(max(done, begin)) }})
		if err != nil {
			return kept, err
		}
		if at = end; can && at < note.Size && time.Since(last) >= checkpointEvery {
			if err := writer.Checkpoint(at, raw); err != nil {
				return kept, err
			}
			kept, last = true, time.Now()
		}
	}
	return kept, nil
}

const defaultCopyCheckpointEvery = 10 * time.Second

// sourceRange is a range of a source, at the same offsets.
type sourceRange struct {
	block.Source
	from, to int64
}

func (p *sourceRange) Size() int64 { return p.to }

func (p *sourceRange) Next(off int64) (block.Extent, error) {
	if off < p.from {
		return block.Extent{Off: off, Len: p.from - off, Kind: block.Hole}, nil
	}
	e, err := p.Source.Next(off)
	e.Len = min(e.Len, p.to-e.Off)
	return e, err
}
