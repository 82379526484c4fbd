package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// job is a kind of I/O.
type job struct {
	name, rw, bs, unit string
	depth              int
}

func (j job) writes() bool { return strings.Contains(j.rw, "write") }

// Reads come before writes, so that the volume over the image reads from the image.
var jobs = []job{
	{"randread-4k-qd1", "randread", "4k", "iops", 1},
	{"randread-4k-qd32", "randread", "4k", "iops", 32},
	{"read-1m", "read", "1m", "MB/s", 8},
	{"randwrite-4k-qd1", "randwrite", "4k", "iops", 1},
	{"randwrite-4k-qd32", "randwrite", "4k", "iops", 32},
	{"write-1m", "write", "1m", "MB/s", 8},
}

// subject is a device or file for fio.
type subject struct{ name, path string }

// ramp is the time before the measurement of a round.
const ramp = 300 * time.Millisecond

// fio runs a round of a job and returns IOPS, or MB/s for large blocks.
func (b *bench) fio(ctx context.Context, j job, path string) (float64, error) {
	out, err := runTool(ctx, "fio", "--name="+j.name, "--filename="+path, "--rw="+j.rw, "--bs="+j.bs,
		"--iodepth="+strconv.Itoa(j.depth), "--size="+strconv.FormatInt(b.sizeMiB, 10)+"m", "--direct=1",
		"--ioengine=libaio", "--time_based", "--runtime="+strconv.Itoa(b.seconds),
		"--ramp_time="+strconv.FormatInt(ramp.Milliseconds(), 10)+"ms",
		"--randrepeat=0", "--norandommap", "--output-format=json")
	if err != nil {
		return 0, err
	}
	type side struct {
		IOPS  float64 `json:"iops"`
		Bytes float64 `json:"bw_bytes"`
	}
	var rep struct {
		Jobs []struct {
			Error int  `json:"error"`
			Read  side `json:"read"`
			Write side `json:"write"`
		} `json:"jobs"`
	}
	if i := strings.IndexByte(out, '{'); i > 0 {
		out = out[i:] // fio prints warnings before the report
	}
	if err := json.Unmarshal([]byte(out), &rep); err != nil || len(rep.Jobs) != 1 || rep.Jobs[0].Error != 0 {
		return 0, fmt.Errorf("fio %s on %s: %w: %.300s", j.name, path, err, out)
	}
	s := rep.Jobs[0].Read
	if j.writes() {
		s = rep.Jobs[0].Write
	}
	if j.unit == "iops" {
		return s.IOPS, nil
	}
	return s.Bytes / 1e6, nil
}

// fillSubject writes all of a subject, because reads of holes are too fast.
func (b *bench) fillSubject(ctx context.Context, path string) error {
	_, err := runTool(ctx, "fio", "--name=fill", "--filename="+path, "--rw=write", "--bs=1m", "--iodepth=8", "--direct=1",
		"--ioengine=libaio", "--size="+strconv.FormatInt(b.sizeMiB, 10)+"m", "--end_fsync=1")
	return err
}

// loopOn attaches a loop device with direct I/O to a file; the returned function detaches the device.
func loopOn(ctx context.Context, path string) (string, func() error, error) {
	out, err := runTool(ctx, "losetup", "--find", "--show", "--direct-io=on", path)
	if err != nil {
		return "", nil, err
	}
	dev := strings.TrimSpace(out)
	return dev, func() error {
		_, err := runTool(context.Background(), "losetup", "-d", dev)
		return err
	}, nil
}

// devices measures all jobs on all subjects, round by round. A volume over an image begins with an empty head, so its
// writes allocate. Therefore a loop device on a sparse file with the same earlier writes is a further baseline.
func (b *bench) devices(ctx context.Context) (err error) {
	size := b.sizeMiB << 20
	plain, looped, raw := filepath.Join(b.dir, "plain"), filepath.Join(b.dir, "looped"), filepath.Join(b.dir, "source.raw")
	thin := filepath.Join(b.dir, "sparse")
	fmt.Fprintln(os.Stderr, "preparing plain file, loop devices, a blank volume and one over an image ...")
	for _, p := range []string{plain, looped} {
		if err := b.fillSubject(ctx, p); err != nil {
			return err
		}
	}
	if err := os.WriteFile(thin, nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(thin, size); err != nil {
		return err
	}
	loop, drop, err := loopOn(ctx, looped)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, drop()) }()
	sparse, dropSparse, err := loopOn(ctx, thin)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dropSparse()) }()
	if err := randomFile(raw, size, false); err != nil {
		return err
	}
	if err := b.in.importFile(ctx, "base", raw); err != nil {
		return err
	}
	if err := os.Remove(raw); err != nil {
		return err
	}
	blank, err := b.in.attachNew(ctx, "blank", "", size)
	if err != nil {
		return err
	}
	if err := b.fillSubject(ctx, blank); err != nil {
		return err
	}
	image, err := b.in.attachNew(ctx, "over-image", "base", size)
	if err != nil {
		return err
	}
	subjects := []subject{{"plain-file", plain}, {loopDirect, loop}, {"drover-blank", blank},
		{"loop-sparse", sparse}, {"drover-image", image}}
	for _, j := range jobs {
		got := map[string][]float64{}
		for r := range b.rounds {
			for _, s := range subjects {
				if s.name == "loop-sparse" && !j.writes() {
					continue // the reads would find holes
				}
				v, err := b.fio(ctx, j, s.path)
				if err != nil {
					return err
				}
				got[s.name] = append(got[s.name], v)
				fmt.Fprintf(os.Stderr, "\r%s round %d of %d: %s %.0f %s\x1b[K", j.name, r+1, b.rounds, s.name, v, j.unit)
			}
		}
		against := func(subject, baseline string) {
			v, base := median(got[subject]), median(got[baseline])
			b.addFigure(j.name, subject, v, j.unit, baseline, base, "")
			if j.depth == 1 && strings.HasPrefix(subject, "drover") {
				b.addFigure(j.name+"-added", subject, 1e6/v-1e6/base, "us", baseline, 0, "per I/O")
			}
		}
		for _, s := range subjects {
			if len(got[s.name]) > 0 {
				against(s.name, loopDirect)
			}
		}
		if j.writes() {
			against("drover-image", "loop-sparse")
		}
	}
	fmt.Fprint(os.Stderr, "\r\x1b[K")
	for _, v := range []string{"blank", "over-image"} {
		if err := b.in.deleteVolume(ctx, v); err != nil {
			return err
		}
	}
	return b.in.deleteImage(ctx, "base")
}
