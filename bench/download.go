package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"drover.io/drover/api"
)

// downloads measures an import over loopback against curl | sha512sum, from the same server.
func (b *bench) downloads(ctx context.Context) error {
	size := b.sizeMiB << 20
	file := filepath.Join(b.dir, "remote.raw")
	if err := randomFile(file, size, false); err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: http.FileServer(http.Dir(b.dir)), ReadHeaderTimeout: time.Minute}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(ln) }()
	defer func() {
		_ = srv.Close()
		<-ended //nolint:errcheck // the error of the cancelled context
	}()
	private := &api.Setting{Value: "true"}
	private.Name = "allow-private-image-sources"
	if err := b.in.client.Create(ctx, private); err != nil {
		return err
	}
	url := "http://" + ln.Addr().String() + "/remote.raw"
	var curl, ours, cpu, rss []float64
	for range min(b.rounds, 3) {
		if err := readAll(file); err != nil {
			return err
		}
		if _, err := runTool(ctx, "sync"); err != nil {
			return err
		}
		began := time.Now()
		if _, err := runTool(ctx, "sh", "-c", "curl -sSf "+url+" | sha512sum"); err != nil {
			return err
		}
		curl = append(curl, float64(size)/1e6/time.Since(began).Seconds())
		u, err := usageOf(b.in.cmd.Process.Pid)
		if err != nil {
			return err
		}
		began = time.Now()
		if err := b.in.importFrom(ctx, "remote", api.SourceDownload, map[string]string{"url": url}); err != nil {
			return err
		}
		ours = append(ours, float64(size)/1e6/time.Since(began).Seconds())
		used, peak, err := u.since()
		if err != nil {
			return err
		}
		cpu, rss = append(cpu, used), append(rss, peak)
		if err := b.in.deleteImage(ctx, "remote"); err != nil {
			return err
		}
	}
	b.addFigure("image-download", "curl|sha512sum", median(curl), "MB/s", "curl|sha512sum", median(curl),
		"curl writes no file")
	b.addFigure("image-download", "drover", median(ours), "MB/s", "curl|sha512sum", median(curl),
		"durable, with SHA-512 and digests")
	b.addFigure("image-download", "drover-cpu", median(cpu), "s", "", 0,
		fmt.Sprintf("of serve, for %s", api.SizeText(size)))
	b.addFigure("image-download", "drover-memory", median(rss), "MiB", "", 0, "peak of serve, less its memory before the "+
		"download")
	return os.Remove(file)
}

// usage is a process's usage at an instant.
type usage struct {
	pid int
	cpu float64 // seconds
	rss float64 // MiB
}

// usageOf returns the current usage, and resets the peak of memory.
func usageOf(pid int) (u usage, err error) {
	u.pid = pid
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0); err != nil {
		return u, err
	}
	u.cpu, err = cpuOf(pid)
	if err == nil {
		u.rss, err = statusOf(pid, "VmRSS:")
	}
	return u, err
}

// since returns the CPU time since usageOf, and the peak of memory above usageOf's value.
func (u usage) since() (cpu, rss float64, err error) {
	if cpu, err = cpuOf(u.pid); err == nil {
		rss, err = statusOf(u.pid, "VmHWM:")
	}
	return cpu - u.cpu, rss - u.rss, err
}

func cpuOf(pid int) (float64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	f := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	user, err := strconv.ParseFloat(string(f[11]), 64)
	if err != nil {
		return 0, err
	}
	system, err := strconv.ParseFloat(string(f[12]), 64)
	return (user + system) / 100, err // a tick is 10 ms on every architecture of Go
}

// statusOf returns a size from /proc/<pid>/status, in MiB.
func statusOf(pid int, key string) (float64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(raw) {
		if f := bytes.Fields(line); len(f) > 1 && string(f[0]) == key {
			kib, err := strconv.ParseFloat(string(f[1]), 64)
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("no %s of process %d", key, pid)
}
