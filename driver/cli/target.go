package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/url"
	"slices"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/localfile"
	"drover.io/drover/driver/cli/text"
)

func (a *app) targetCommand() *cobra.Command {
	c := groupCommand("target", "Stores that backups lie in", "targets", "bt")
	c.AddCommand(a.targetCreate(), a.targetList(), a.targetShow(), a.targetSync(), a.targetDelete())
	return c
}

// targetFlags are the flags of a new target.
type targetFlags struct {
	secret, password, credentials string
	upload, download              string
	poll                          time.Duration
	readOnly, wait                bool
}

func (a *app) targetCreate() *cobra.Command {
	var f targetFlags
	c := &cobra.Command{
		Use: "create [NAME] URL", Short: "Use a folder, a share or a bucket as the store of backups",
		Long: "Makes a backup target and waits until a node can use it; an empty store gets a new repository. Without\n" +
			"NAME the target is \"" + api.DefaultBackupTarget + "\", which backups use that name no target.\n" +
			"\n" +
			"file:///PATH is a folder that every node has under this path. nfs://HOST:/PATH is an NFS export and\n" +
			"cifs://HOST/SHARE/PATH an SMB share, which Drover mounts for itself. s3://BUCKET@REGION/PATH is a bucket,\n" +
			"azblob://CONTAINER@core.windows.net/PATH a container of Azure, sftp://USER@HOST:PORT/PATH a folder of an\n" +
			"SSH server. A Secret has the credentials. Drover encrypts all backups with the password of the Secret;\n" +
			"without a password, with a published one that keeps nothing secret.",
		Example: "  drover target create file:///mnt/backups --password-file ./password\n" +
			"  drover target create nas nfs://nas.example:/exports/backups --password-file ./password\n" +
			"  drover target create offsite s3://backups@eu-west-1/drover --credentials-file ./s3.env\n" +
			"  drover target create offsite s3://backups@eu-west-1/drover --secret logins/s3",
		Args: checkArgs(cobra.RangeArgs(1, 2)),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			name := api.DefaultBackupTarget
			if len(left) == 2 {
				name = left[0]
			}
			began := time.Now()
			t, err := f.makeTarget(ctx, c, name, left[len(left)-1])
			if err != nil {
				return err
			}
			result := fmt.Sprintf("target %q created: `drover target show %s` says whether it is available", name, name)
			if f.wait {
				if t, err = awaitTarget(ctx, c, name, cmd.ErrOrStderr()); err != nil {
					return err
				}
				result = fmt.Sprintf("target %q is available, in %s", name, text.Seconds(time.Since(began)))
				if !t.Status.Encrypted && t.Status.Format != api.FormatLonghorn {
					fmt.Fprintf(cmd.ErrOrStderr(), "target %q has the published password: every reader of the store can read the "+
						"backups\n", name)
				}
			}
			return a.printObject(cmd.OutOrStdout(), t, func(w io.Writer) { fmt.Fprintln(w, result) })
		},
	}
	c.Flags().StringVar(&f.secret, "secret", "", "Secret with credentials and password: [NAMESPACE/]NAME")
	c.Flags().StringVar(&f.password, "password-file", "", "file with the password of the backups, for a new Secret")
	c.Flags().StringVar(&f.credentials, "credentials-file", "",
		"file with lines KEY=VALUE, such as "+api.SecretAccessKey+"=..., for a new Secret")
	c.Flags().DurationVar(&f.poll, "poll-interval", api.DefaultPollInterval,
		"how often the store is searched for backups of other clusters; 0: only by drover target sync")
	c.Flags().StringVar(&f.upload, "max-upload-rate", "", "most bytes that each node sends per second: 20Mi (default: no "+
		"limit)")
	c.Flags().StringVar(&f.download, "max-download-rate", "", "most bytes that each node reads per second (default: no "+
		"limit)")
	c.Flags().BoolVar(&f.readOnly, "read-only", false, "make and delete no backups there")
	c.Flags().BoolVar(&f.wait, "wait", true, "wait until a node can use the target")
	return c
}

// makeTarget creates a target, and the Secret of the target if the flags name files.
func (f *targetFlags) makeTarget(ctx context.Context, c client.Client, name, address string) (
	*api.BackupTarget, error) {
	if err := checkName("target", name); err != nil {
		return nil, err
	}
	if err := checkAddress(address); err != nil {
		return nil, err
	}
	if f.poll < 0 {
		return nil, usagef("--poll-interval %s: write a time, or 0 to search only by `drover target sync`", f.poll)
	}
	upload, err := parseRate("--max-upload-rate", f.upload)
	if err != nil {
		return nil, err
	}
	download, err := parseRate("--max-download-rate", f.download)
	if err != nil {
		return nil, err
	}
	ref, err := parseSecret(f.secret)
	if err != nil {
		return nil, err
	}
	if f.secret != "" && f.password+f.credentials != "" {
		return nil, usagef("--secret names a Secret, --password-file and --credentials-file make one: leave one of them out")
	}
	values, err := localfile.ReadValues(f.credentials, f.password)
	if err != nil {
		return nil, err
	}
	if values != nil {
		ref = &api.SecretRef{Namespace: api.DefaultSecretNamespace, Name: "backup-target-" + name}
	}
	t := &api.BackupTarget{Spec: api.BackupTargetSpec{BackupTargetURL: address, CredentialSecret: ref,
		PollInterval: &metav1.Duration{Duration: f.poll}, ReadOnly: f.readOnly, MaxUploadRate: upload,
		MaxDownloadRate: download}}
	t.Name = name
	if values != nil {
		// The API server checks the target before the Secret exists, so that a refused target leaves no Secret.
		if err := createTarget(ctx, c, t.DeepCopy(), client.DryRunAll); err != nil {
			return nil, err
		}
		if err := ensureSecret(ctx, c, *ref, values); err != nil {
			return nil, err
		}
	}
	return t, createTarget(ctx, c, t)
}

// parseRate parses a flag with bytes per second; empty: no limit.
func parseRate(flag, text string) (int64, error) {
	if text == "" {
		return 0, nil
	}
	n, err := parseSize(text)
	if err != nil {
		return 0, usagef("%s: %w", flag, err)
	}
	return n, nil
}

func createTarget(ctx context.Context, c client.Client, t *api.BackupTarget, opts ...client.CreateOption) error {
	err := c.Create(ctx, t, opts...)
	if apierrors.IsAlreadyExists(err) {
		return api.Errorf(api.Exists, "target %q exists already: see `drover target show %s`", t.Name, t.Name)
	}
	return explain(ctx, err)
}

// checkAddress refuses the commonest mistakes in the URL of a store before an object exists; the node that opens the
// store has the last word. The error never prints a URL with a password.
func checkAddress(address string) error {
	u, err := url.Parse(address)
	if err != nil || !slices.Contains(api.TargetSchemes, u.Scheme) {
		return usagef("the address of a store is %s", api.TargetURLs)
	}
	if _, has := u.User.Password(); has {
		return usagef("the address of a store has no credentials, because every reader of targets sees the address: write " +
			"the credentials into a file and name the file with --credentials-file")
	}
	switch inFolder := u.Scheme == "file" || u.Scheme == "vfs"; {
	case u.Scheme == "s3" && u.Host == "" && u.User == nil:
		return usagef("%s names no bucket: write s3://BUCKET@REGION/PATH", address)
	case inFolder && (u.Host != "" || u.Path == "" || u.Path == "/"):
		return usagef("%s names no folder: write file:///PATH, with three slashes", address)
	case !inFolder && u.Host == "":
		return usagef("%s names no server: write %s", address, api.TargetURLs)
	}
	return nil
}

// lastingReasons are the reasons of an unavailable target that end only when a user changes something.
var lastingReasons = []string{api.ReasonBadURL, api.ReasonBadSecret, api.ReasonDenied, api.ReasonWrongPassword,
	api.ReasonOtherRepository, api.ReasonLostRepository, api.ReasonBadRepository, api.ReasonReadOnlyAndEmpty}

// unavailableReason returns the condition of a target that cannot be used, or nil.
func unavailableReason(t *api.BackupTarget) *metav1.Condition {
	cond := meta.FindStatusCondition(t.Status.Conditions, api.ConditionUnavailable)
	if cond == nil || cond.Status != metav1.ConditionTrue {
		return nil
	}
	return cond
}

// remarkOnTarget returns a function that writes each new reason why a target is unavailable, as a remark.
func remarkOnTarget(remarks io.Writer, name string) func(*api.BackupTarget) (why string) {
	remark := remarkOn(remarks, "target", name)
	return func(t *api.BackupTarget) (why string) {
		if cond := unavailableReason(t); cond != nil {
			why = cmp.Or(cond.Message, t.Status.Message, cond.Reason)
		}
		remark(why)
		return why
	}
}

// awaitTarget waits until the target is available. A reason that only a user can end is an error.
func awaitTarget(ctx context.Context, c client.WithWatch, name string, remarks io.Writer) (*api.BackupTarget, error) {
	gone := api.Errorf(api.NotFound, "target %q was deleted meanwhile", name)
	remark, why := remarkOnTarget(remarks, name), ""
	t, err := awaitObject(ctx, c, name, gone, func(t *api.BackupTarget) (bool, error) {
		cond := unavailableReason(t)
		switch {
		case t.Status.Available:
			return true, nil
		case cond != nil && slices.Contains(lastingReasons, cond.Reason):
			return true, api.Errorf(api.Other, "target %q is unavailable: %s; correct the store or the Secret, or delete "+
				"the target with `drover target delete %s`", name, cmp.Or(cond.Message, cond.Reason), name)
		}
		why = remark(t)
		return false, nil
	})
	return t, explainTimeout(err, "target %q is not available yet%s", name, text.Colon(why))
}

func (a *app) targetList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the backup targets", Aliases: []string{"ls"}, Args: checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var list api.BackupTargetList
			if err := c.List(ctx, &list); err != nil {
				return explain(ctx, err)
			}
			return a.printList(cmd.OutOrStdout(), &list, "NAME URL AVAILABLE ENCRYPTED BACKUPS NODE SYNCED AGE MESSAGE",
				func(o runtime.Object) []string {
					t := o.(*api.BackupTarget)
					return []string{t.Name, t.Spec.BackupTargetURL, fmt.Sprint(t.Status.Available),
						fmt.Sprint(t.Status.Encrypted), fmt.Sprint(t.Status.Backups), t.Status.OwnerID, text.AgeOf(t.Status.LastSyncedAt),
						text.Age(t.CreationTimestamp), t.Status.Message}
				})
		},
	}
}

func (a *app) targetShow() *cobra.Command {
	return &cobra.Command{
		Use: "show [NAME]", Short: "Show a backup target (default: " + api.DefaultBackupTarget + ")",
		Args: checkArgs(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeNames(targets, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var t api.BackupTarget
			if err := getTarget(ctx, c, targetName(left), &t); err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), &t, func(w io.Writer) {
				describe.Target(w, &t)
				describe.Events(w, describe.EventsOf(ctx, c, &t, "BackupTarget"))
			})
		},
	}
}

// targetName returns the target that the arguments name, or the default.
func targetName(left []string) string {
	if len(left) == 0 {
		return api.DefaultBackupTarget
	}
	return left[0]
}

// getTarget is getObject, with the way to a first target.
func getTarget(ctx context.Context, c client.Client, name string, t *api.BackupTarget) error {
	err := getObject(ctx, c, "target", name, t)
	if api.KindOf(err) == api.NotFound && name == api.DefaultBackupTarget {
		return api.Errorf(api.NotFound, "target %q does not exist: make it with `drover target create URL`, or name another "+
			"target; `drover target list` shows all", name)
	}
	return err
}

// checkWritable refuses a target in which Drover makes no backup.
func checkWritable(ctx context.Context, c client.Client, name string) error {
	var t api.BackupTarget
	if err := getTarget(ctx, c, name, &t); err != nil {
		return err
	}
	if why := t.ExplainReadOnly(); why != "" {
		return api.Errorf(api.InUse, "target %q %s", name, why)
	}
	return nil
}

func (a *app) targetSync() *cobra.Command {
	return &cobra.Command{
		Use:   "sync [NAME]",
		Short: "Search the store of a target for backups now (default: " + api.DefaultBackupTarget + ")",
		Args:  checkArgs(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeNames(targets, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began, name := time.Now(), targetName(left)
			if err := getTarget(ctx, c, name, &api.BackupTarget{}); err != nil {
				return err
			}
			t, err := syncTarget(ctx, c, name, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), t, func(w io.Writer) {
				fmt.Fprintf(w, "target %q has %s, searched in %s\n", name, api.CountText(int(t.Status.Backups), "backup"),
					text.Seconds(time.Since(began)))
			})
		},
	}
}

// requestOf writes a request into the spec of a target.
func requestOf(ctx context.Context, c client.WithWatch, name string, change func(*api.BackupTarget) error) error {
	_, err := await.Edit(ctx, c, name, func(t *api.BackupTarget) (bool, error) { return true, change(t) })
	if apierrors.IsNotFound(err) {
		return api.Errorf(api.NotFound, "target %q was deleted meanwhile", name)
	}
	return explain(ctx, err)
}

// syncTarget asks for a list of the store, and waits until the target's node has followed this request or a later one.
func syncTarget(ctx context.Context, c client.WithWatch, name string, remarks io.Writer) (*api.BackupTarget, error) {
	var asked metav1.Time
	err := requestOf(ctx, c, name, func(t *api.BackupTarget) error {
		asked = api.NewRequest(t.Spec.SyncRequestedAt)
		t.Spec.SyncRequestedAt = &asked
		return nil
	})
	if err != nil {
		return nil, err
	}
	t, err := awaitAnswer(ctx, c, name, "the store of target %q was not searched yet%s", remarks,
		func(t *api.BackupTarget) bool {
			return t.Status.SyncedRequest != nil && !t.Status.SyncedRequest.Before(&asked)
		})
	if err != nil {
		return nil, err
	}
	if cond := unavailableReason(t); cond != nil {
		err = api.Errorf(api.Other, "target %q is unavailable: %s; see `drover target show %[1]s`", name,
			cmp.Or(cond.Message, cond.Reason))
	}
	return t, err
}
