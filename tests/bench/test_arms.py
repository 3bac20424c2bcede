from saf.bench.arms import Arm, arms_of, default_kernels, plan


def test_every_kernel_has_a_control_and_the_first_is_what_others_are_compared_with():
    comparisons = plan(
        kernels=["cudnn", "flash"], others=["auto", "flash"], backends=["toeplitz"], rates=[0.25], free=True
    )
    told = [(c.role, c.baseline.name, c.arm.name) for c in comparisons]
    assert told == [
        ("control", "ordinary cudnn", "control cudnn"),
        ("control", "ordinary flash", "control flash"),
        ("kernel", "ordinary cudnn", "ordinary flash"),
        ("kernel", "ordinary cudnn", "ordinary auto"),
        ("frozen", "ordinary cudnn", "25% toeplitz cudnn"),
        ("free", "ordinary cudnn", "25% free cudnn"),
        ("frozen", "ordinary flash", "25% toeplitz flash"),
        ("free", "ordinary flash", "25% free flash"),
    ]
    assert len(arms_of(comparisons)) == 9
    assert Arm(**comparisons[4].arm.to_dict()) == comparisons[4].arm


def test_cudnn_is_the_baseline_on_cuda():
    assert default_kernels((), "cuda") == ("cudnn",)
    assert default_kernels((), "cpu") == ("auto",)
    assert default_kernels(("flash",), "cuda") == ("flash",)
