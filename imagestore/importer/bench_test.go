package importer_test

import (
	"crypto/sha512"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/imagestore/format/oracle"
	"drover.io/drover/imagestore/importer"
)

// usage is the cost of a step.
type usage struct{ wall, cpu float64 }

func measured(b *testing.B, who int, step func()) usage {
	b.Helper()
	busy := func() float64 {
		var u syscall.Rusage
		if err := syscall.Getrusage(who, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
	}
	syscall.Sync()
	start, before := time.Now(), busy()
	step()
	return usage{time.Since(start).Seconds(), busy() - before}
}

func middle(all []usage) usage {
	var wall, cpu []float64
	for _, u := range all {
		wall, cpu = append(wall, u.wall), append(cpu, u.cpu)
	}
	slices.Sort(wall)
	slices.Sort(cpu)
	return usage{wall[len(all)/2], cpu[len(all)/2]}
}

// BenchmarkImport compares imports of a disk of 1 GiB with real files, in all formats, with the tool of the format; in
// turn, medians. An import also makes the SHA-512 of the source and the digests of the content, and is durable at the
// end; the tool does none of this. On a busy machine the processor time says more than the clock. The benchmark also
// reports SHA-512 of the source's bytes on a single core: the hash of a stream cannot be made in parallel, so the hash
// bounds an import.
func BenchmarkImport(b *testing.B) {
	dir := b.TempDir()
	raw := oracle.Disk(b, dir)
	out := filepath.Join(dir, "out")
	const qemu = "qemu-img convert -O raw -m 2 "
	for _, f := range []struct{ name, make, tool string }{
		{"raw", "cp --sparse=always ", "cp --sparse=always "},
		{"qcow2-plain", "qemu-img convert -f raw -O qcow2 ", qemu},
		{"qcow2-zlib", "qemu-img convert -f raw -O qcow2 -c -W -m 2 ", qemu},
		{"qcow2-zstd", "qemu-img convert -f raw -O qcow2 -c -o compression_type=zstd -W -m 2 ", qemu},
		{"vmdk", "qemu-img convert -f raw -O vmdk ", qemu},
		{"vmdk-stream", "qemu-img convert -f raw -O vmdk -o subformat=streamOptimized ", qemu},
		{"vhdx", "qemu-img convert -f raw -O vhdx ", qemu},
		{"gz", "gzip -1 -c < ", "gzip -dc < "},
		{"xz", "xz -1 -T2 -c < ", "xz -dc -T2 < "},
		{"zst", "zstd -q -T2 -c < ", "zstd -q -dc < "},
	} {
		b.Run(f.name, func(b *testing.B) {
			image := filepath.Join(dir, "image."+f.name)
			piped := f.make[len(f.make)-2] == '<'
			command(b, "sh", "-c", f.make+raw+map[bool]string{true: " > ", false: " "}[piped]+image)
			defer os.Remove(image)
			d := newDisk(b, b.TempDir())
			var own, other []usage
			var size, oracleSize int64
			for b.Loop() {
				read(b, image) // from memory for both
				own = append(own, measured(b, syscall.RUSAGE_SELF, func() {
					want := newWant()
					got, err := importer.Import(b.Context(), d, want, new(importer.Progress), file(image))
					if err != nil {
						b.Fatal(err)
					}
					size = got.Allocated
					if err := importer.Remove(b.Context(), d, want); err != nil {
						b.Fatal(err)
					}
				}))
				other = append(other, measured(b, syscall.RUSAGE_CHILDREN, func() {
					cmd := f.tool + image + " " + out
					if piped {
						cmd = f.tool + image + " > " + out
					}
					if said, err := exec.Command("sh", "-c", cmd).CombinedOutput(); err != nil {
						b.Fatalf("%s: %v\n%s", cmd, err, said)
					}
				}))
				var st syscall.Stat_t
				if err := syscall.Stat(out, &st); err != nil {
					b.Fatal(err)
				}
				oracleSize = st.Blocks * 512
				_ = os.Remove(out)
			}
			content := read(b, image)
			hash := measured(b, syscall.RUSAGE_SELF, func() { sha512.Sum512(content) })
			o, t := middle(own), middle(other)
			b.ReportMetric(o.wall, "s")
			b.ReportMetric(t.wall, "tool-s")
			b.ReportMetric(t.wall/o.wall, "x-faster")
			b.ReportMetric(o.cpu, "cpu-s")
			b.ReportMetric(t.cpu, "tool-cpu-s")
			b.ReportMetric(hash.wall, "sha512-s")
			b.ReportMetric(float64(size)/float64(oracleSize), "du-of-tool")
			b.ReportMetric(0, "ns/op")
		})
	}
}
