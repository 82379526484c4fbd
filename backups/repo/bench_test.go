package repo

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/pack"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/block/suite"
)

// processorSeconds is the processor time of this process.
func processorSeconds(b *testing.B) float64 {
	var u unix.Rusage
	must(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// residentMiB is the most memory that this process had.
func residentMiB(b *testing.B) float64 {
	status, err := os.ReadFile("/proc/self/status")
	must(b, err)
	_, line, _ := strings.Cut(string(status), "VmHWM:")
	n, err := strconv.Atoi(strings.Fields(line)[0])
	must(b, err)
	return float64(n) / 1024
}

// BenchmarkFolder: a GiB of random chunks of 2 MiB into a folder, by a goroutine per processor, until durable; then all
// chunks are read.
func BenchmarkFolder(b *testing.B) {
	const chunk, chunks = 2 << 20, 512
	memory := make([][]byte, runtime.NumCPU())
	for i := range memory {
		memory[i] = make([]byte, chunk)
		for j := 0; j < chunk; j += 8 {
			binary.LittleEndian.PutUint64(memory[i][j:], rand.Uint64())
		}
	}
	b.SetBytes(chunk * chunks)
	var read, written float64
	for b.Loop() {
		store, err := folder.Open(b.Context(), b.TempDir())
		must(b, err)
		must(b, Init(b.Context(), store, password, Options{}))
		r, err := Open(b.Context(), store, password, Options{Cache: b.TempDir()})
		must(b, err)
		blobs := loadIndex(b, r)
		begin := processorSeconds(b)
		w := newWriter(b, blobs, WriterOptions{})
		ids := make([]blob.ID, chunks)
		inParallel(b, len(memory), chunks, func(worker, i int) error {
			binary.LittleEndian.PutUint64(memory[worker], uint64(i))
			var err error
			ids[i], _, err = w.Add(b.Context(), blob.Data, memory[worker])
			return err
		})
		must(b, w.Flush(b.Context()))
		must(b, w.Close())
		written += processorSeconds(b) - begin
		b.StopTimer()
		b.ReportMetric(residentMiB(b), "MiB-resident")
		begin, start := processorSeconds(b), time.Now()
		inParallel(b, len(memory), chunks, func(worker, i int) error {
			_, err := blobs.Read(b.Context(), ids[i], blob.Data, nil)
			return err
		})
		read += processorSeconds(b) - begin
		b.ReportMetric(chunk*chunks/1e6/time.Since(start).Seconds(), "MB/s-read")
		b.StartTimer()
	}
	b.ReportMetric(written/float64(b.N), "cpu-s/written")
	b.ReportMetric(read/float64(b.N), "cpu-s/read")
}

// inParallel calls step n times from some workers.
func inParallel(b *testing.B, workers, n int, step func(worker, i int) error) {
	var next atomic.Int64
	var group errgroup.Group
	for worker := range workers {
		group.Go(func() error {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if err := step(worker, i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	must(b, group.Wait())
}

// memoryPeak samples the private memory of this process until the returned function is called, which returns the most,
// in MiB. Pages of files are the kernel's.
func memoryPeak(b *testing.B) (stop func() float64) {
	runtime.GC()
	debug.FreeOSMemory()
	ctx, cancel := context.WithCancel(b.Context())
	peaks := make(chan int)
	go func() {
		peak := 0
		for ctx.Err() == nil {
			status, _ := os.ReadFile("/proc/self/status")
			_, line, _ := strings.Cut(string(status), "RssAnon:")
			n, _ := strconv.Atoi(strings.Fields(line)[0])
			peak = max(peak, n)
			time.Sleep(5 * time.Millisecond)
		}
		peaks <- peak
	}()
	return func() float64 {
		cancel()
		return float64(<-peaks) / 1024
	}
}

// BenchmarkLoadIndex: the index of five million blobs in packs of 16, a repository of 10 TiB: without a cache, by the
// next session, after a sweep replaced one of 105 index files, and lookups, of which half find a blob.
func BenchmarkLoadIndex(b *testing.B) {
	if !suite.All() {
		b.Skip("only where DROVER_TEST=all")
	}
	path := b.TempDir()
	store, err := folder.Open(b.Context(), path)
	must(b, err)
	r := openRepository(b, store)
	random := rand.NewChaCha8([32]byte{1})
	var ids []blob.ID
	var last blob.ID
	for range 105 {
		var file index.FileBuilder
		p := index.Pack{Entries: make([]pack.Entry, 16)}
		for !file.Full(len(p.Entries)) {
			_, _ = random.Read(p.ID[:])
			for i := range p.Entries {
				_, _ = random.Read(p.Entries[i].ID[:])
				p.Entries[i].Offset, p.Entries[i].Length = uint32(i)<<21, 2<<20
			}
			file.Add(p)
			ids = append(ids, p.Entries[0].ID)
		}
		last, err = r.saveFile(b.Context(), indexFolder, file.Bytes())
		must(b, err)
	}
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	load := func(what string) *Blobs {
		stop, begin, start := memoryPeak(b), processorSeconds(b), time.Now()
		blobs, err := r.LoadIndex(b.Context())
		must(b, err)
		b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms-"+what)
		b.ReportMetric((processorSeconds(b)-begin)*1000, "cpu-ms-"+what)
		b.ReportMetric(stop(), "MiB-"+what)
		return blobs
	}
	for b.Loop() {
		r.options.Cache = b.TempDir()
		r.openCache()
		must(b, load("first").Close())
		must(b, load("next").Close())
		sealed, err := store.Get(b.Context(), indexFolder+last.String(), 0, -1)
		must(b, err)
		plain, err := r.key.Open(sealed)
		must(b, err)
		resealed := r.key.Seal(nil, plain)
		must(b, store.Delete(b.Context(), indexFolder+last.String()))
		last = blob.Sum(resealed)
		must(b, store.Put(b.Context(), indexFolder+last.String(), resealed))
		blobs := load("swept")
		begin := processorSeconds(b)
		const lookups = 200_000
		for i := range lookups {
			id := ids[i/2%len(ids)]
			id[31] ^= byte(i % 2)
			if ok, err := blobs.Has(b.Context(), id, blob.Data); err != nil || ok != (i%2 == 0) {
				b.Fatal(ok, err)
			}
		}
		b.ReportMetric((processorSeconds(b)-begin)*1e9/lookups, "cpu-ns/lookup")
		must(b, blobs.Close())
	}
}

// slowStore answers no read before a time has passed.
type slowStore struct {
	target.Store
	latency time.Duration
}

func (s slowStore) Get(ctx context.Context, name string, off, n int64) ([]byte, error) {
	time.Sleep(s.latency)
	return s.Store.Get(ctx, name, off, n)
}

// BenchmarkSnapshots: ten thousand snapshots in a folder with a latency of 1 ms: listed and read by a node that knows
// none, and by the node again.
func BenchmarkSnapshots(b *testing.B) {
	if !suite.All() {
		b.Skip("only where DROVER_TEST=all")
	}
	const snapshots = 10_000
	store, err := folder.Open(b.Context(), b.TempDir())
	must(b, err)
	r := openRepository(b, slowStore{store, time.Millisecond})
	inParallel(b, 16, snapshots, func(_, i int) error {
		tree := blob.Sum(binary.LittleEndian.AppendUint64(nil, uint64(i)))
		_, err := r.SaveSnapshot(b.Context(), Snapshot{Time: time.Unix(1_700_000_000, int64(i)), Tree: &tree,
			Paths: []string{"/volumes/pvc-" + strconv.Itoa(i)}, Hostname: "node-1", Username: "drover",
			Tags: []string{"drover-backup=backup-" + strconv.Itoa(i), "drover-volume=pvc-" + strconv.Itoa(i%100)}})
		return err
	})
	load := func(what string) {
		begin, start := processorSeconds(b), time.Now()
		files, err := r.ListSnapshots(b.Context())
		must(b, err)
		var n atomic.Int64
		must(b, r.LoadSnapshots(b.Context(), files, func(_ int, _ Snapshot, err error) error {
			n.Add(1)
			return err
		}))
		if n.Load() != snapshots {
			b.Fatalf("%d snapshots were read, want %d", n.Load(), snapshots)
		}
		b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms-"+what)
		b.ReportMetric((processorSeconds(b)-begin)*1000, "cpu-ms-"+what)
	}
	for b.Loop() {
		r.options.Cache = b.TempDir()
		r.openCache()
		load("first")
		load("next")
	}
}
