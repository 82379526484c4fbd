package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/progress"
	"drover.io/drover/driver/cli/text"
)

// ExportOptions select a source, a file and a format.
type ExportOptions struct {
	Image, Snapshot string // one name, the other is empty
	File            string
	Format          string // raw or qcow2
	Compress        bool   // qcow2 alone
	Force           bool   // replace an existing file
	Progress        func(done, total int64)
}

// Exporter writes the content of an image or a snapshot into a file. Exporter reads disks of this machine.
type Exporter func(ctx context.Context, c client.Client, o ExportOptions) error

// exportFlags adds the flags of all exports.
func exportFlags(c *cobra.Command, o *ExportOptions) {
	c.Flags().StringVar(&o.Format, "format", "raw", "raw (sparse) or qcow2")
	c.Flags().BoolVar(&o.Compress, "compress", false, "with qcow2: compress with zstd (QEMU 5.1 or later reads it)")
	c.Flags().BoolVar(&o.Force, "force", false, "replace an existing file")
}

// exported is the result of an export as json and yaml.
type exported struct {
	outcome
	File   string `json:"file"`
	Format string `json:"format"`
	Size   int64  `json:"size"` // of the disk image inside, bytes
}

// exportObject exports an object with a progress bar. The kind is a key of kinds.
func (a *app) exportObject(ctx context.Context, cmd *cobra.Command, c client.Client, kind, name string,
	o ExportOptions) error {
	if o.Format != "raw" && o.Format != "qcow2" {
		return usagef("--format %q: want raw or qcow2", o.Format)
	}
	if o.Compress && o.Format != "qcow2" {
		return usagef("--compress is for --format qcow2")
	}
	began := time.Now()
	what := fmt.Sprintf("%s %q", nounOf(kind), name)
	bar := progress.New(cmd.ErrOrStderr(), what)
	defer bar.Clear()
	var size int64
	o.Progress = func(done, total int64) {
		size = total
		bar.Show("writing", done, total)
	}
	if err := a.exporter(ctx, c, o); err != nil {
		return explain(ctx, err)
	}
	bar.Clear()
	switch a.output {
	case "json", "yaml":
		return a.encodeValue(cmd.OutOrStdout(), exported{outcome{Kind: kinds[kind], Name: name, Result: "exported"}, o.File,
			o.Format, size})
	case "name":
		a.printOutcome(cmd, kind, name, "")
		return nil
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s written to %s: %s, %s, in %s\n", what, o.File, api.SizeText(size),
		o.Format, text.Seconds(time.Since(began)))
	return err
}

// nounOf is the word of commands for a kind.
func nounOf(kind string) string { return strings.TrimPrefix(kind, "backing") }

func (a *app) imageExport() *cobra.Command {
	var o ExportOptions
	c := a.newExport(&o, "backingimage", &api.BackingImage{}, &o.Image)
	c.Short, c.ValidArgsFunction = "Write a backing image into a file, raw or qcow2", a.completeNames(images, true)
	c.Long = "Writes the content of the image into a file. The command reads the image on a disk of this machine: run " +
		"the command on a node with a copy."
	c.Example = "  drover image export debian debian.raw\n" +
		"  drover image export debian debian.qcow2 --format qcow2 --compress"
	return c
}

func (a *app) snapshotExport() *cobra.Command {
	var o ExportOptions
	c := a.newExport(&o, "snapshot", &api.Snapshot{}, &o.Snapshot)
	c.Short = "Write the content of a snapshot into a file, raw or qcow2"
	c.ValidArgsFunction = a.completeNames(snapshots, true)
	return c
}

// newExport is the export of an object whose layers exist. The kind is a key of kinds. The command reads the object,
// and stores its name in source.
func (a *app) newExport(o *ExportOptions, kind string, object client.Object, source *string) *cobra.Command {
	c := &cobra.Command{Use: "export NAME FILE", Args: checkArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			if err := getObject(ctx, c, nounOf(kind), left[0], object); err != nil {
				return err
			}
			*source, o.File = left[0], left[1]
			return a.exportObject(ctx, cmd, c, kind, left[0], *o)
		},
	}
	exportFlags(c, o)
	return c
}

func (a *app) volumeExport() *cobra.Command {
	var o ExportOptions
	c := &cobra.Command{
		Use: "export NAME FILE", Short: "Write the present content of a volume into a file, raw or qcow2",
		Long: "Takes a snapshot of the volume, attached or not, writes the snapshot's content into a file, and deletes " +
			"the snapshot.",
		Args: checkArgs(cobra.ExactArgs(2)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) (err error) {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var v api.Volume
			if err := getObject(ctx, c, "volume", left[0], &v); err != nil {
				return err
			}
			if err := refuseUnusable(&v); err != nil {
				return err
			}
			s := api.NewSnapshot(&v, "export-"+string(api.NewUID()))
			s.Spec.Labels = map[string]string{api.LabelClone: "file"}
			if err := c.Create(ctx, s); err != nil {
				return explain(ctx, err)
			}
			defer func() {
				ctx, cancel := cleanup(ctx)
				defer cancel()
				err = errors.Join(err, explain(ctx, client.IgnoreNotFound(c.Delete(ctx, s))))
			}()
			gone := api.Errorf(api.NotFound, "the snapshot was deleted meanwhile")
			if _, err := awaitObject(ctx, c, s.Name, gone, func(s *api.Snapshot) (bool, error) {
				return s.Status.ReadyToUse, nil
			}); err != nil {
				return explainTimeout(err, "the snapshot of volume %q is not there yet", v.Name)
			}
			o.Snapshot, o.File = s.Name, left[1]
			return a.exportObject(ctx, cmd, c, "volume", v.Name, o)
		},
	}
	exportFlags(c, &o)
	return c
}

func (a *app) imageCreate() *cobra.Command {
	var from, nodeTags, diskTags string
	c := &cobra.Command{
		Use: "create NAME --from VOLUME", Short: "Make a backing image of a volume or a snapshot",
		Long: "The image refers to the layers of the snapshot: Drover copies no data. For an image of a volume, " +
			"attached or not,\nDrover takes a snapshot first. You can delete volume and snapshot as soon as the image is " +
			"ready.",
		Example: "  drover image create golden --from vm-1\n  drover image create golden --from snap://vm-1/installed",
		Args:    checkArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			if from == "" {
				return usagef("the command needs a source: add --from VOLUME or --from SNAPSHOT")
			}
			if err := api.ValidateImageName(left[0]); err != nil {
				return usagef("%w", err)
			}
			source, _, _, err := sourceOf(ctx, c, from)
			if err != nil {
				return err
			}
			of, err := api.ParseDataSource(source)
			if err != nil {
				return err
			}
			began := time.Now()
			img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceExport,
				SourceParameters: map[string]string{api.ExportVolume: of.Volume},
				NodeSelector:     parseTags(nodeTags), DiskSelector: parseTags(diskTags)}}
			if img.Name = left[0]; of.Snapshot != "" {
				img.Spec.SourceParameters[api.ExportSnapshot] = of.Snapshot
			}
			if err := c.Create(ctx, img); err != nil {
				return explain(ctx, err)
			}
			gone := api.Errorf(api.NotFound, "image %q was deleted meanwhile", img.Name)
			img, err = awaitObject(ctx, c, img.Name, gone, func(i *api.BackingImage) (bool, error) {
				if i.Status.State == api.ImageFailed {
					return true, api.Errorf(api.Other, "image %q cannot be made: %s", i.Name, i.Status.Message)
				}
				return i.Status.State == api.ImageReady, nil
			})
			if err != nil {
				return explainTimeout(err, "image %q is not ready yet", left[0])
			}
			return a.printObject(cmd.OutOrStdout(), img, func(w io.Writer) {
				fmt.Fprintf(w, "image %q of %s created: %s, in %s\n", img.Name, source, api.SizeText(img.Status.VirtualSize),
					text.Seconds(time.Since(began)))
			})
		},
	}
	c.Flags().StringVar(&from, "from", "", "volume or snapshot, by name or handle")
	c.Flags().StringVar(&nodeTags, "node-selector", "", "only nodes with these tags: a,b")
	c.Flags().StringVar(&diskTags, "disk-selector", "", "only disks with these tags: a,b")
	return c
}
