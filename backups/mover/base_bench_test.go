package mover

import (
	"encoding/binary"
	"fmt"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block/suite"
)

// BenchmarkIncrement: a backup of one changed chunk. The base has DROVER_BASE GiB (1 TiB by default), in whole chunks
// or with 16 fragments for every seventh chunk; its blobs are small. Metrics are the times, and the requests to the
// store, of a node that has read the base before (warm), and of another node, which has only the index (cold).
func BenchmarkIncrement(b *testing.B) {
	if !suite.All() {
		b.Skip("only where DROVER_TEST=all")
	}
	size := int64(suite.Count(b, "DROVER_BASE", 1024, 1024)) << 30
	for _, every := range []int64{0, 7} {
		w := newWorld(b)
		base := w.fakeBackup(size, every)
		v := newDisk(size)
		v.fill(1, 0)
		o := options("v")
		o.Base, o.Changed = &base, []int64{0}
		for _, cache := range []string{"cold", "warm"} {
			b.Run(fmt.Sprintf("fragments-%d/%s", every, cache), func(b *testing.B) {
				for b.Loop() {
					if cache == "cold" {
						w.open()
						blobs, err := w.r.LoadIndex(b.Context())
						must(b, err)
						must(b, blobs.Close())
					}
					clear(w.store.counts)
					v.fill(uint64(time.Now().UnixNano()), 0)
					began, processor := time.Now(), processorTime(b)
					result := w.backup(v, o)
					b.ReportMetric(time.Since(began).Seconds(), "s-backup")
					b.ReportMetric((processorTime(b) - processor).Seconds(), "cpu-s-backup")
					requests := -result.Packs
					for _, n := range w.store.counts {
						requests += int64(n)
					}
					b.ReportMetric(float64(requests), "requests-beside-packs")
				}
			})
		}
	}
}

// processorTime is the time that the process had a processor.
func processorTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	must(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// fakeBackup makes a snapshot of size bytes with small blobs for chunks, and for fragments of each chunk whose number
// every divides; 0: of none.
func (w *world) fakeBackup(size, every int64) blob.ID {
	lock, err := w.r.Lock(w.Context(), repo.Shared)
	must(w, err)
	blobs, err := w.r.LoadIndex(w.Context())
	must(w, err)
	o := options("v")
	writer, err := repo.NewWriter(lock.Context(), blobs, repo.WriterOptions{Lock: lock})
	must(w, err)
	builder, err := manifest.NewBuilder(writer, nil, size)
	must(w, err)
	number := uint64(every) << 40
	add := func() blob.ID {
		number++
		b := binary.LittleEndian.AppendUint64(nil, number)
		id, _, err := writer.Add(w.Context(), blob.Data, b)
		must(w, err)
		return id
	}
	for segment := range manifest.Segments(size) {
		chunks := make([]manifest.Chunk, manifest.Chunks(manifest.SegmentLength(size, segment)))
		for i := range chunks {
			if every == 0 || (segment*manifest.SegmentChunks+int64(i))%every > 0 {
				chunks[i].Digest = add()
				continue
			}
			chunks[i].FragmentSize = 128 << 10
			for range chunkSize / chunks[i].FragmentSize {
				chunks[i].Fragments = append(chunks[i].Fragments, add())
			}
			chunks[i].Digest = blob.Sum(chunks[i].Fragments[0][:])
		}
		must(w, builder.Put(w.Context(), segment, chunks))
	}
	root, err := builder.Finish(w.Context(), o.Description)
	must(w, err)
	must(w, writer.Flush(w.Context()))
	s := o.Snapshot
	s.Tree, s.Paths = &root, []string{manifest.Path(manifest.Volume, "v")}
	id, err := w.r.SaveSnapshot(w.Context(), s)
	must(w, err)
	must(w, writer.Close())
	must(w, blobs.Close())
	must(w, lock.Close(w.Context()))
	return id
}
