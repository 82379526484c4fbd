package archive

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain can make the test binary the measured program, which unpacks standard input to standard output and prints
// the cost. The kernel's figures would include the start of the large binary, and the parent's memory.
func TestMain(m *testing.M) {
	if os.Getenv("DROVER_UNPACK") == "" {
		os.Exit(m.Run())
	}
	start := time.Now()
	if err := unpackTo(os.Stdout, os.Stdin, Limits{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	wall := time.Since(start)
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		panic(err)
	}
	_, peak, _ := strings.Cut(string(status), "VmHWM:")
	peak, _, _ = strings.Cut(strings.TrimSpace(peak), " ")
	fmt.Fprintln(os.Stderr, int64(wall), u.Utime.Nano()+u.Stime.Nano(), peak)
	os.Exit(0)
}

// unpackSelf measures the test binary.
func unpackSelf(t testing.TB, from, to, tmp string) cost {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(self)
	var msg strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, &msg
	cmd.Env = append(os.Environ(), "DROVER_UNPACK=1", "TMPDIR="+tmp)
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, msg.String())
	}
	var wall, cpu, peak int64
	if _, err := fmt.Sscan(msg.String(), &wall, &cpu, &peak); err != nil {
		t.Fatalf("%v: %q", err, msg.String())
	}
	return cost{time.Duration(wall), time.Duration(cpu), peak >> 10}
}

func unpackTo(w io.Writer, f io.ReadSeeker, lim Limits) error {
	head := make([]byte, HeadSize)
	n, err := io.ReadFull(f, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	r, err := NewReader(struct{ io.Reader }{f}, Detect(head[:n]), lim)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.Copy(w, r)
	return err
}

type cost struct {
	wall, cpu time.Duration
	rss       int64 // MiB
}

func (c cost) String() string {
	return fmt.Sprintf("%6.2f s wall %6.2f s CPU %4d MiB", c.wall.Seconds(), c.cpu.Seconds(), c.rss)
}

// measure runs a tool from one file to another.
func measure(t testing.TB, from, to string, args ...string) cost {
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, os.Stderr
	start := time.Now()
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	s := cmd.ProcessState
	return cost{time.Since(start), s.SystemTime() + s.UserTime(), s.SysUsage().(*syscall.Rusage).Maxrss >> 10}
}

// benchArchives returns files to unpack: the files in the folder DROVER_ARCHIVES, or archives of the test binary.
func benchArchives(b *testing.B, self string) []string {
	dir := os.Getenv("DROVER_ARCHIVES")
	if dir == "" {
		dir = b.TempDir()
		plain, err := os.ReadFile(self)
		if err != nil {
			b.Fatal(err)
		}
		plain = append(plain, make([]byte, len(plain))...)
		for name, tool := range map[string]string{"6.gz": "gzip -6", "6.xz": "xz -6",
			"blocks.xz": "xz -6 -T2 --block-size=8MiB",
			"3.zst":     "zstd -3", "19.zst": "zstd -19"} {
			packed := run(b, plain, append(strings.Fields(tool), "-c")...)
			if err := os.WriteFile(filepath.Join(dir, name), packed, 0o600); err != nil {
				b.Fatal(err)
			}
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.*z*"))
	if err != nil || len(files) == 0 {
		b.Fatalf("%s has no archives: %v", dir, err)
	}
	return files
}

// BenchmarkUnpack compares Drover with the tools, from file to file, in turns, with the best of some runs of each.
func BenchmarkUnpack(b *testing.B) {
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	for _, f := range benchArchives(b, self) {
		tool := []string{"gzip", "-dc"}
		switch filepath.Ext(f) {
		case ".xz":
			tool[0] = "xz"
		case ".zst":
			tool = []string{"zstd", "-dcq", "--long=27"}
		}
		b.Run(filepath.Base(f), func(b *testing.B) {
			out := filepath.Join(b.TempDir(), "out")
			for b.Loop() {
				var theirs, ours cost
				for i := range 7 {
					if c := measure(b, f, out, tool...); i == 0 || c.wall < theirs.wall {
						theirs = c
					}
					if c := unpackSelf(b, f, out, b.TempDir()); i == 0 || c.wall < ours.wall {
						ours = c
					}
				}
				b.Logf("%-6s %v\nDrover %v", tool[0], theirs, ours)
				if st, err := os.Stat(out); err == nil {
					b.ReportMetric(float64(st.Size())/ours.cpu.Seconds()/1e6, "MB/cpu-s")
				}
				b.ReportMetric(ours.wall.Seconds()/theirs.wall.Seconds(), "wall-ratio")
				b.ReportMetric(ours.cpu.Seconds()/theirs.cpu.Seconds(), "cpu-ratio")
				b.ReportMetric(float64(ours.rss), "MiB-peak")
			}
		})
	}
}
