package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// The file system of a day: a database, small files and a log.
const (
	dayVolume   = "day"
	daySize     = 3 << 30
	dayDatabase = 512 << 20
	dayPages    = 1000 // of 8 KiB, at random places of the database
	dayFiles    = 3000 // of 4 to 64 KiB
	dayRewrites = 300  // of the files
	dayLog      = 40 << 20
)

// day measures backups of a volume with an ext4 file system that changes as in a day: 300 of 3,000 small files, 1,000
// pages of a database, and a log. The first backup after a change splits the chunks that changed.
func (b *bench) day(ctx context.Context) (err error) {
	dev, err := b.in.attachNew(ctx, dayVolume, "", daySize)
	if err != nil {
		return err
	}
	if _, err := runTool(ctx, "mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", dev); err != nil {
		return err
	}
	dir := filepath.Join(b.dir, "day")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount(dev, dir, "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount %s: %w", dev, err)
	}
	mounted := true
	defer func() {
		if mounted { // after an error
			err = errors.Join(err, unix.Unmount(dir, 0))
		}
	}()
	if err := fillDay(dir); err != nil {
		return err
	}
	for day := range 4 { // before the first change, and after each of three
		changed := int64(0)
		if day > 0 {
			if changed, err = changeOneDay(dir, day); err != nil {
				return err
			}
		}
		made, err := b.in.backUp(ctx, fmt.Sprintf("day-%d", day), dayVolume, api.BackupIncremental)
		if err != nil {
			return err
		}
		if day > 0 {
			b.addFigure("backup-day-bytes", fmt.Sprintf("day %d", day), float64(made.Status.NewlyUploadDataSize)/(1<<20),
				"MiB", "changed", float64(changed)/(1<<20), "ext4: pages of a database, small files, a log; bytes of files written")
		}
	}
	mounted = false
	if err := unix.Unmount(dir, 0); err != nil {
		return err
	}
	return b.in.deleteVolume(ctx, dayVolume)
}

// fillDay makes the files of a day before the first change.
func fillDay(dir string) error {
	err := randomFile(filepath.Join(dir, "database"), dayDatabase, false)
	for i := 0; err == nil && i < dayFiles; i++ {
		err = rewriteSmall(dir, i)
	}
	unix.Sync()
	return err
}

// rewriteSmall replaces a small file as most programs do: by a rename.
func rewriteSmall(dir string, i int) error {
	name := filepath.Join(dir, fmt.Sprintf("file-%d", i))
	if err := randomFile(name+".new", 4<<10+rand.Int64N(60<<10), false); err != nil {
		return err
	}
	return os.Rename(name+".new", name)
}

// changeOneDay returns how many bytes it wrote into files.
func changeOneDay(dir string, day int) (written int64, err error) {
	f, err := os.OpenFile(filepath.Join(dir, "database"), os.O_WRONLY, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	page := make([]byte, 8<<10)
	for range dayPages {
		fillRandom(page)
		if _, err := f.WriteAt(page, rand.Int64N(dayDatabase/int64(len(page)))*int64(len(page))); err != nil {
			return 0, err
		}
	}
	for range dayRewrites {
		if err := rewriteSmall(dir, rand.IntN(dayFiles)); err != nil {
			return 0, err
		}
	}
	err = randomFile(filepath.Join(dir, fmt.Sprintf("log-%d", day)), dayLog, false)
	unix.Sync()
	return dayPages*int64(len(page)) + dayRewrites*(34<<10) + dayLog, err
}
