package repo

import (
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

// BenchmarkLoadIndex: the index of five million blobs in packs of 16, a repository of 10 TiB, without a cache and with
// the table of an earlier session.
func BenchmarkLoadIndex(b *testing.B) {
	if !suite.All() {
		b.Skip("only where DROVER_TEST=all")
	}
	store, err := folder.Open(b.Context(), b.TempDir())
	must(b, err)
	r := openRepository(b, store)
	random := rand.NewChaCha8([32]byte{1})
	for range 100 {
		var file index.FileBuilder
		p := index.Pack{Entries: make([]pack.Entry, 16)}
		for !file.Full(len(p.Entries)) {
			_, _ = random.Read(p.ID[:])
			for i := range p.Entries {
				_, _ = random.Read(p.Entries[i].ID[:])
				p.Entries[i].Offset, p.Entries[i].Length = uint32(i)<<21, 2<<20
			}
			file.Add(p)
		}
		_, err := r.saveFile(b.Context(), indexFolder, file.Bytes())
		must(b, err)
	}
	runtime.GC()
	debug.FreeOSMemory()
	must(b, os.WriteFile("/proc/self/clear_refs", []byte("5"), 0)) // the most memory from now on
	for b.Loop() {
		r.options.Cache = b.TempDir()
		begin := processorSeconds(b)
		blobs := loadIndex(b, r)
		b.ReportMetric(processorSeconds(b)-begin, "cpu-s")
		b.ReportMetric(residentMiB(b), "MiB-building")
		must(b, blobs.Close())
		start := time.Now()
		blobs = loadIndex(b, r)
		b.ReportMetric(float64(time.Since(start).Microseconds())/1000, "ms-cached")
		runtime.GC()
		debug.FreeOSMemory()
		must(b, os.WriteFile("/proc/self/clear_refs", []byte("5"), 0))
		b.ReportMetric(residentMiB(b), "MiB-resident")
		must(b, blobs.Close())
	}
}
