package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/disks"
	"drover.io/drover/driver/cli/progress"
	"drover.io/drover/driver/cli/text"
)

func findCopies(ctx context.Context, c client.Client, img *api.BackingImage) (*describe.Copies, error) {
	w := &describe.Copies{ByDisk: map[api.UID]api.ImageCopy{},
		Paths: map[api.UID]string{}, Using: map[api.UID]int{}}
	var err error
	if w.Users, err = imageUsers(ctx, c, img.Name); err != nil {
		return nil, err
	}
	var copies api.ImageCopyList
	if err := c.List(ctx, &copies, client.MatchingLabels{api.LabelImage: api.LabelValue(img.Name)}); err != nil {
		return nil, explain(ctx, err)
	}
	for _, f := range copies.Items {
		if f.Spec.UUID == img.Status.UUID {
			w.ByDisk[f.Spec.Disk] = f
		}
	}
	var nodes api.NodeList
	if err := c.List(ctx, &nodes); err != nil {
		return nil, explain(ctx, err)
	}
	for _, n := range nodes.Items {
		for _, d := range n.Status.Disks {
			w.Paths[d.UID] = d.Path
		}
	}
	if len(w.Users) == 0 {
		return w, nil
	}
	var reps api.ReplicaList
	if err := c.List(ctx, &reps, client.MatchingLabels{api.LabelImage: api.LabelValue(img.Name)}); err != nil {
		return nil, explain(ctx, err)
	}
	for _, r := range reps.Items {
		w.Using[r.Spec.Disk]++
	}
	return w, nil
}

func (a *app) imageCleanup() *cobra.Command {
	var on []string
	c := &cobra.Command{
		Use:   "cleanup NAME",
		Short: "Remove copies of a backing image that no volume needs, without waiting for the clean-up interval",
		Long: "Removes unused copies, on the disks given with --disk or on all of them. Copies that a volume needs stay,\n" +
			"and so do as many as the image wants at least (minNumberOfCopies).",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(images, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var img api.BackingImage
			if err := getObject(ctx, c, "image", left[0], &img); err != nil {
				return err
			}
			want, err := cleanupDisks(ctx, c, &img, on)
			if err != nil {
				return err
			}
			base := img.DeepCopy()
			for _, uid := range want {
				if !slices.Contains(img.Spec.CleanupDisks, uid) {
					img.Spec.CleanupDisks = append(img.Spec.CleanupDisks, uid)
				}
			}
			if err := c.Patch(ctx, &img, client.MergeFrom(base)); err != nil {
				return explain(ctx, err)
			}
			gone := api.Errorf(api.NotFound, "image %q was deleted meanwhile", img.Name)
			now, err := awaitObject(ctx, c, img.Name, gone, func(i *api.BackingImage) (bool, error) {
				return !slices.ContainsFunc(want, func(d api.UID) bool { return slices.Contains(i.Spec.CleanupDisks, d) }), nil
			})
			if err != nil {
				return explainTimeout(err, "the clean-up of image %q continues", img.Name)
			}
			w, err := findCopies(ctx, c, now) // the image's own list of copies follows later
			if err != nil {
				return err
			}
			kept := 0
			for _, uid := range want {
				if f, is := w.ByDisk[uid]; is && f.DeletionTimestamp.IsZero() {
					kept++
				}
			}
			a.printOutcome(cmd, "backingimage", img.Name, fmt.Sprintf("cleaned: %d of %d copies stay, which are needed "+
				"or the last", kept, len(want)))
			return nil
		},
	}
	c.Flags().StringSliceVar(&on, "disk", nil, "UID or path of a disk (default: every disk with a copy)")
	return c
}

func cleanupDisks(ctx context.Context, c client.Client, img *api.BackingImage, names []string) ([]api.UID, error) {
	var out []api.UID
	if len(names) == 0 {
		for _, f := range img.Status.Copies {
			out = append(out, f.Disk)
		}
		return out, nil
	}
	for _, d := range names {
		found, err := disks.Find(ctx, c, "", d)
		if err != nil {
			return nil, explain(ctx, err)
		}
		out = append(out, found.Status.UID)
	}
	return out, nil
}

func (a *app) imageVerify() *cobra.Command {
	var background bool
	c := &cobra.Command{
		Use:   "verify NAME",
		Short: "Read every copy of a backing image and compare it with its digests",
		Long: "Reads every copy of a backing image and compares it with its digests. A damaged copy is made again by\n" +
			"itself, from another one or from the source; one that volumes stand on is repaired in place. Exit status 1:\n" +
			"a copy was damaged or gone, or is away.",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(images, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var img api.BackingImage
			if err := getObject(ctx, c, "image", left[0], &img); err != nil {
				return err
			}
			if img.Status.ReadyCopies == 0 && !slices.ContainsFunc(img.Status.Copies, notWell) {
				return api.Errorf(api.Unavailable, "image %q has no ready copy: `drover image show %s` has the "+
					"reason", img.Name,
					img.Name)
			}
			base := img.DeepCopy()
			if img.Annotations == nil {
				img.Annotations = map[string]string{}
			}
			token := time.Now().UTC().Format("20060102T150405.000000000Z")
			img.Annotations[api.AnnotationVerify] = token
			if err := c.Patch(ctx, &img, client.MergeFrom(base)); err != nil {
				return explain(ctx, err)
			}
			if background {
				a.printOutcome(cmd, "backingimage", img.Name, "is being verified: see `drover image show "+img.Name+"`")
				return nil
			}
			return a.awaitVerified(ctx, cmd, c, &img, token)
		},
	}
	c.Flags().BoolVar(&background, "background", false, "return at once; `drover image show` tells the outcome")
	return c
}

// beingMade are the states of an incomplete copy.
var beingMade = []api.ImageState{api.ImagePending, api.ImageStarting, api.ImageInProgress, api.ImageTransfer}

// notWell reports whether a copy is damaged or missing.
func notWell(s api.ImageCopySummary) bool {
	return s.State == api.ImageUnknown || s.State == api.ImageFailed
}

// awaitVerified follows the copies until every copy that was ready is verified or removed.
func (a *app) awaitVerified(ctx context.Context, cmd *cobra.Command, c client.WithWatch, img *api.BackingImage,
	token string) error {
	verdicts := map[api.UID]string{} // "": intact
	removed := map[api.UID]bool{}    // before the verification
	ready := map[api.UID]bool{}      // at the start
	again := false                   // Drover repairs a damaged copy
	w, err := findCopies(ctx, c, img)
	if err != nil {
		return err
	}
	p := progress.New(cmd.ErrOrStderr(), "image "+img.Name)
	known := map[string]client.Object{}
	for _, f := range w.ByDisk {
		known[f.Name] = &f
	}
	for _, s := range img.Status.Copies {
		ready[s.Disk] = s.State == api.ImageReady
		if _, is := w.ByDisk[s.Disk]; !is {
			removed[s.Disk] = true
		}
	}
	pending := func() bool {
		return slices.ContainsFunc(img.Status.Copies, func(s api.ImageCopySummary) bool {
			_, read := verdicts[s.Disk]
			return !read && !removed[s.Disk] && ready[s.Disk]
		})
	}
	look := func(o client.Object, gone bool) (bool, error) {
		f := o.(*api.ImageCopy)
		if f.Spec.UUID == img.Status.UUID {
			st := f.Status
			_, read := verdicts[f.Spec.Disk]
			lost := !read && ready[f.Spec.Disk] && slices.Contains(beingMade, st.State)
			again = again || lost || st.State == api.ImageFailed && !st.NextTry.IsZero()
			removed[f.Spec.Disk] = !read && (gone || !f.DeletionTimestamp.IsZero())
			switch {
			case removed[f.Spec.Disk]:
			case lost: // the import verifies a new copy, which proves nothing about the lost copy
				verdicts[f.Spec.Disk] = "the copy was lost"
			case st.Verified == token && st.State == api.ImageFailed:
				verdicts[f.Spec.Disk] = st.Message
			case st.Verified == token && verdicts[f.Spec.Disk] == "":
				verdicts[f.Spec.Disk] = ""
			case notWell(api.ImageCopySummary{State: st.State}):
				verdicts[f.Spec.Disk] = "not verified: " + string(st.State) + text.Colon(st.Message)
			}
		}
		p.Show(fmt.Sprintf("verifying, %d of %d copies", len(verdicts), len(img.Status.Copies)), 0, 0)
		return !pending(), nil
	}
	if !pending() { // report earlier verdicts
		for _, o := range known {
			_, _ = look(o, false)
		}
	} else {
		err = explain(ctx, await.EachAndGone(ctx, c, &api.ImageCopyList{}, known, look,
			client.MatchingLabels{api.LabelImage: api.LabelValue(img.Name)}))
	}
	p.Clear()
	if err != nil {
		return explainTimeout(err, "the verification of image %q continues, see `drover image show %s`", img.Name, img.Name)
	}
	var bad []string
	for disk, why := range verdicts {
		if why != "" {
			bad = append(bad, fmt.Sprintf("disk %s of node %s: %s", w.DiskName(disk), w.ByDisk[disk].Spec.Node, why))
		}
	}
	if len(bad) > 0 {
		slices.Sort(bad)
		then := ""
		if again {
			then = fmt.Sprintf("; Drover makes damaged or lost copies again: `drover image show %s` has the progress", img.Name)
		}
		return api.Errorf(api.Corrupt, "image %q: %d of %d copies are not well: %s%s", img.Name, len(bad), len(verdicts),
			strings.Join(bad, "; "), then)
	}
	well := fmt.Sprintf("verified: %d copies match their digests", len(verdicts))
	switch len(verdicts) {
	case 0:
		return api.Errorf(api.NotFound, "image %q: its copies were removed before they were verified", img.Name)
	case 1:
		well = "verified: 1 copy matches its digests"
	}
	a.printOutcome(cmd, "backingimage", img.Name, well)
	return nil
}
