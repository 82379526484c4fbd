package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// spent is the cost of an import or conversion.
type spent struct {
	seconds, cpu float64
	rss          int64 // peak, bytes
	disk         int64 // of the result, bytes
}

const qemu = "qemu-img convert -O raw -m 2 $in $out"

// samples lists the formats, the command for a sample, and the format's tool, as a user would run the tool.
var samples = []struct{ name, make, tool string }{
	{"raw", "cp --sparse=always $in $out", "cp --sparse=always $in $out"},
	{"raw-synced", "cp --sparse=always $in $out", "cp --sparse=always $in $out && sync $out"},
	{"qcow2-plain", "qemu-img convert -f raw -O qcow2 $in $out", qemu},
	{"qcow2-zlib", "qemu-img convert -f raw -O qcow2 -c -W -m 2 $in $out", qemu},
	{"qcow2-zstd", "qemu-img convert -f raw -O qcow2 -c -o compression_type=zstd -W -m 2 $in $out", qemu},
	{"vmdk", "qemu-img convert -f raw -O vmdk $in $out", qemu},
	{"vmdk-stream", "qemu-img convert -f raw -O vmdk -o subformat=streamOptimized $in $out", qemu},
	{"vhdx", "qemu-img convert -f raw -O vhdx $in $out", qemu},
	{"gz", "gzip -1 -c $in > $out", "gzip -dc $in > $out"},
	{"xz", "xz -1 -T2 -c $in > $out", "xz -dc -T2 $in > $out"},
	{"zst", "zstd -q -T2 -c $in > $out", "zstd -q -dc $in > $out"},
}

// formats compares imports of a disk in all formats with the tool of the format. The tools neither hash nor sync;
// imports do both.
func (b *bench) formats(ctx context.Context, size int64) error {
	raw := filepath.Join(b.dir, "disk.raw")
	defer func() { _ = os.Remove(raw) }()
	made := false
	var errs []error
	for _, f := range samples {
		if !b.isWanted("images", "formats", f.name) {
			continue
		}
		if !made {
			fmt.Fprintln(os.Stderr, "preparing images ...")
			if err := sampleFile(raw, size); err != nil {
				return err
			}
			made = true
		}
		if err := b.measureFormat(ctx, f.name, f.make, f.tool, raw, size); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.name, err))
		}
	}
	return errors.Join(errs...)
}

func (b *bench) measureFormat(ctx context.Context, name, with, convert, raw string, size int64) error {
	image, copied := filepath.Join(b.dir, "image."+name), filepath.Join(b.dir, "copied")
	defer func() { _, _ = os.Remove(image), os.Remove(copied) }()
	if _, err := runShell(ctx, with, raw, image); err != nil {
		return err
	}
	rounds := min(b.rounds, 3)
	if !hasGoal("image-import-"+name) && !b.long {
		rounds = 1
	}
	var own, other []spent
	for range rounds {
		for _, step := range []func() error{func() error {
			s, err := b.importAndDelete(ctx, name, image)
			own = append(own, s)
			return err
		}, func() error {
			s, err := runShell(ctx, convert, image, copied)
			other = append(other, s)
			return err
		}} {
			if err := readAll(image); err != nil { // page cache for all subjects
				return err
			}
			if _, err := runTool(ctx, "sync"); err != nil {
				return err
			}
			if err := step(); err != nil {
				return err
			}
		}
		if err := os.Remove(copied); err != nil {
			return err
		}
	}
	var hash []float64
	for range rounds {
		s, err := runShell(ctx, "sha512sum $in > $out", image, copied)
		if err != nil {
			return err
		}
		hash = append(hash, s.seconds)
	}
	b.addFormat(name, strings.Fields(convert)[0], own, other, median(hash), float64(size)/1e6)
	return nil
}

// addFormat records the figures of a format.
func (b *bench) addFormat(format, toolName string, own, other []spent, hash, mb float64) {
	of := func(all []spent, what func(spent) float64) float64 {
		var v []float64
		for _, s := range all {
			v = append(v, what(s))
		}
		return median(v)
	}
	rate := func(s spent) float64 { return mb / s.seconds }
	o, t := of(own, rate), of(other, rate)
	name, note := "image-import-"+format, "durable, with SHA-512 and digests"
	if limit := mb / hash; limit < t {
		note += fmt.Sprintf("; sha512sum of the file alone: %.0f MB/s, ratio to that %.2f", limit, o/limit)
	}
	b.addFigure(name, toolName, t, "MB/s", "", 0, "not durable when it ends")
	if limit := mb / hash; strings.HasPrefix(format, "raw") && limit < t { // hashing bounds every import
		b.addFigure(name, "drover", o, "MB/s", "sha512sum", limit, "durable, with SHA-512 and digests; SHA-512 is the limit")
	} else {
		b.addFigure(name, "drover", o, "MB/s", toolName, t, note)
	}
	cpu := func(s spent) float64 { return s.cpu }
	rss := func(s spent) float64 { return float64(s.rss) / (1 << 20) }
	du := func(s spent) float64 { return float64(s.disk) / (1 << 20) }
	b.addFigure(name+"-cpu", "drover", of(own, cpu), "s", toolName, of(other, cpu), "processor time")
	b.addFigure(name+"-memory", "drover", of(own, rss), "MiB", "", 0,
		fmt.Sprintf("peak above idle; %s: %.0f MiB in all", toolName, of(other, rss)))
	b.addFigure(name+"-du", "drover", of(own, du), "MiB", toolName, of(other, du), "on the disk")
}

// runShell runs a shell command with $in and $out set.
func runShell(ctx context.Context, command, in, out string) (spent, error) {
	var said strings.Builder
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Env = append(os.Environ(), "in="+in, "out="+out)
	cmd.Stderr = &said
	began := time.Now()
	if err := cmd.Run(); err != nil {
		return spent{}, fmt.Errorf("%s: %w: %s", command, err, said.String())
	}
	s := spent{seconds: time.Since(began).Seconds(),
		cpu: (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()}
	if u, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		s.rss = u.Maxrss << 10
	}
	var st syscall.Stat_t
	if err := syscall.Stat(out, &st); err != nil {
		return s, err
	}
	s.disk = st.Blocks * 512
	return s, nil
}

// importAndDelete imports a file and deletes the image again.
func (b *bench) importAndDelete(ctx context.Context, name, file string) (s spent, err error) {
	name = strings.ToLower("fmt-" + name)
	pid := b.in.cmd.Process.Pid
	before, cpu, err := processStatus(pid, true)
	if err != nil {
		return s, err
	}
	began := time.Now()
	if err := b.in.importFile(ctx, name, file); err != nil {
		return s, err
	}
	s.seconds = time.Since(began).Seconds()
	peak, after, err := processStatus(pid, false)
	if err != nil {
		return s, err
	}
	s.cpu, s.rss = after-cpu, peak-before
	if s.disk, err = allocatedBytes(b.in.disk); err != nil {
		return s, err
	}
	return s, b.in.deleteImage(ctx, name)
}

// processStatus returns the peak of a process's memory in bytes since the last reset, and the CPU time in seconds.
func processStatus(pid int, reset bool) (peak int64, cpu float64, err error) {
	proc := fmt.Sprintf("/proc/%d/", pid)
	if reset { // resets the peak to the current memory
		if err := os.WriteFile(proc+"clear_refs", []byte("5"), 0); err != nil {
			return 0, 0, err
		}
	}
	lines, err := os.ReadFile(proc + "status")
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(lines)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" {
			peak, err = strconv.ParseInt(f[1], 10, 64)
		}
	}
	stat, serr := os.ReadFile(proc + "stat")
	if err != nil || serr != nil {
		return 0, 0, fmt.Errorf("memory of process %d: %w", pid, errors.Join(err, serr))
	}
	// utime and stime are fields 14 and 15. The name before may contain any character, but ends with a bracket.
	f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	const tick = 100 // USER_HZ
	for _, v := range f[11:13] {
		n, perr := strconv.ParseFloat(v, 64)
		if perr != nil {
			return 0, 0, perr
		}
		cpu += n / tick
	}
	return peak << 10, cpu, nil
}

// allocatedBytes returns the allocated size of a disk's layers.
func allocatedBytes(disk string) (n int64, err error) {
	names, err := filepath.Glob(filepath.Join(disk, "layers", "*", "data"))
	for _, name := range names {
		var st syscall.Stat_t
		if err := syscall.Stat(name, &st); err != nil {
			return 0, err
		}
		n += st.Blocks * 512
	}
	return n, err
}
